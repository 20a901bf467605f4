"""What is predicted to be the fastest set of layouts for the lengths of a run's samples."""
