"""What a rank runs to train: the loop over steps, checks, evaluations and records."""
