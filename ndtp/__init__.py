"""High-dimensional tensor parallelism for PyTorch."""
