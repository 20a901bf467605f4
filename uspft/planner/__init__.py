"""What is predicted without a device: traffic, memory, FLOPs, and what follows for a layout."""
