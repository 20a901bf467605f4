"""Predictions that need no device: traffic, memory, FLOPs, and what follows for a layout."""
