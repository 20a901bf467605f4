"""Calibration: ranks measure what this cluster can do, and the results are fitted to the lines of a
hardware file."""
