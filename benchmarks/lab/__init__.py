"""What the benchmarks share: where results stand, what they were taken on, and pictures."""
