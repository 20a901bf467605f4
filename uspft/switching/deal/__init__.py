"""Which ranks take which rows of a step, and when."""
