"""Live bytes of tensors, counted exactly, of a training step's activations."""
