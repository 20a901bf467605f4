"""The choice of the set of layouts that is predicted to be fastest for the lengths of a run's
samples."""
