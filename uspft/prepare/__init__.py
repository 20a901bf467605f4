"""The work before ranks start: a recipe becomes a job. No process of a run is started here."""
