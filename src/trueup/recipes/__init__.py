"""Named, complete configurations."""
