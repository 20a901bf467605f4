"""Checkpoints by parameter name: resume, and export to Hugging Face folders.

Nothing is imported here: commands read checkpoints without the engine that wrote them.
"""
