"""The commands of uspft, each in one file."""
