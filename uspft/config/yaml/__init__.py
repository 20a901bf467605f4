"""YAML files and a command line are read here as a recipe, or as every problem at once."""
