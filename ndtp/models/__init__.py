"""`parallelize`, and what it knows of the architectures of models."""
