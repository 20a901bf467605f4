"""Packed rows from a corpus (stream), and each rank's share of them step by step (loader)."""
