"""A whole training step: uspft beside transformers' Trainer with DeepSpeed's ALST."""
