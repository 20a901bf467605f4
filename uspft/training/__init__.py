"""Inside ranks: the loop over steps, and what goes with it."""
