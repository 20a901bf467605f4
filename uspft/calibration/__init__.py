"""What this cluster can do, measured by its ranks and fitted to the lines of a hardware file."""
