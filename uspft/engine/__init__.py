"""The seam to DeepSpeed: its configuration from recipe and layout, and ZeRO 0 to 3 as one step.

Nothing is imported here: only ranks need DeepSpeed, and `check` must do without it.
"""
