"""One command, one page."""
