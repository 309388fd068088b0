"""The engine that runs in this process: plain torch over a Hugging Face causal LM."""
