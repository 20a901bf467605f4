"""YAML files and command lines become a recipe, or every problem at once."""
