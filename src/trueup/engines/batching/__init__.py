"""The continuous batching of transformers as an engine."""
