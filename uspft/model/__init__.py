"""A Hugging Face model that is loaded once and made to attend across ranks."""
