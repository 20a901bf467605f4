"""The work before ranks start: a recipe becomes a job. No rank is started here."""
