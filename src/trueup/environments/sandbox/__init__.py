"""What isolates model-written code."""
