"""What `verify` runs: a recipe's first steps under every layout, compared with one process."""
