"""Models small enough that the right answer is known: what a part would do, without running it."""
