"""MeshSlice beside other ways to split a matrix product over chips."""
