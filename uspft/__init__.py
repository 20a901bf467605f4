"""uspft: fine-tune Hugging Face models on long context from one recipe."""

__version__ = "0.1.0"
