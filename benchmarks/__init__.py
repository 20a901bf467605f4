"""Side by side with other engines; each benchmark prints a table and writes JSON."""
