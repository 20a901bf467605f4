"""Packed rows out of a corpus (stream), each rank's share of them step by step (loader), and which
positions a rank holds, searched for beside the step (orders)."""
