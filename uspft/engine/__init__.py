"""The seam to DeepSpeed: recipe and layout → its configuration; ZeRO 0 to 3 behind one step.

Nothing is imported here: only ranks need DeepSpeed, and `check` must do without.
"""
