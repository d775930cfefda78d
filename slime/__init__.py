"""slime: post-training of language-model agents."""

__version__ = "0.1.0"
