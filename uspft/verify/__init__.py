"""A recipe's first steps under every layout, beside one process."""
