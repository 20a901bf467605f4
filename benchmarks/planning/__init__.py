"""Layouts as papers measured them, and in the order that the planner predicts."""
