"""Before ranks: a recipe becomes a job. Nothing here starts a process of a run."""
