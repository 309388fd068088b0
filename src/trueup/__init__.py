"""trueup: asynchronous reinforcement learning of language-model agents with known token origins."""

__version__ = "0.1.0"
