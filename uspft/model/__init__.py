"""A Hugging Face model, loaded once and parallelised: attention across ranks, tensor parallelism,
experts, stages, and memory savings."""
