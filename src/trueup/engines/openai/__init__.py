"""Servers that speak the OpenAI completions protocol and return log-probs and token ids."""
