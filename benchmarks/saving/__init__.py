"""What a checkpoint takes to be saved: its checksums, and what a step loses to it."""
