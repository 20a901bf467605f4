"""The interface to DeepSpeed: its configuration from recipe and layout, and ZeRO 0 to 3 behind one
step function.

Nothing is imported here: only ranks need DeepSpeed, and `check` must run without it.
"""
