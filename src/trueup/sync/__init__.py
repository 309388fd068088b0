"""How weights travel from trainer to engines."""
