"""The arithmetic of splitting a row: which rank holds, computes and sends what, found on the
host."""
