"""The functions that Triton compiles."""
