"""Layouts of four hosts behind slow links, in the order that the planner predicts."""
