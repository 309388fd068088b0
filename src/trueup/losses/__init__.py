"""Policy losses, advantages and reductions."""
