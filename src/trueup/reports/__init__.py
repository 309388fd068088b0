"""What is shown of a run, read from its directory alone."""
