"""What a rank runs to train: the loop over steps, and what goes with it."""
