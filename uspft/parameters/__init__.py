"""A model's parameters: which rank holds which part, and where their values come from."""
