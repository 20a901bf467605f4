"""A Hugging Face model, loaded once and taught to attend across ranks."""
