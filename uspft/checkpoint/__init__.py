"""Checkpoints by parameter name, to resume a run from and to export to Hugging Face folders.

Nothing is imported here: commands read checkpoints without the engine that wrote them.
"""
