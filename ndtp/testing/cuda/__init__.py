"""CUDA without a device: recorded streams, memory, collectives and graphs, and the dispatch of thread blocks."""
