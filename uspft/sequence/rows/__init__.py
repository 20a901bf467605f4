"""The pure half of splitting a row: who holds and computes what, worked out on the host."""
