"""MeshSlice measured: four hosts of one process each, between which links are slow."""
