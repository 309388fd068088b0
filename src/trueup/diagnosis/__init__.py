"""What an engine's log-probs are worth, and which cause explains what is wrong with them."""
