"""The one limit of every wait for a process or a thread in the tests."""

HANG_SECONDS = 500.0
"""Seconds after which what a test waits for hangs: ten times what the slowest takes, less than
pytest gives a test (pyproject.toml), and than the ten minutes that what must be ended sleeps."""
