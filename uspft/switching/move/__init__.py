"""Weights, gradients and optimizer states that move between layouts of different tensor degrees."""
