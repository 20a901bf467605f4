"""How long dealing out a row takes."""
