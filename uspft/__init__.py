"""uspft: fine-tune Hugging Face LLaMA and Qwen models on long context from one recipe."""

__version__ = "0.1.0"
