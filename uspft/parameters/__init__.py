"""Who holds what of a model's parameters, and where their values come from."""
