"""Single-device Triton GEMMs for tensor-parallel blocks; knows nothing of grids or process groups."""
