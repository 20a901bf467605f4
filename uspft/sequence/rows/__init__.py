"""The arithmetic of splitting a row, in numpy on the host: which rank stores, computes and sends
what."""
