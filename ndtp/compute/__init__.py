"""The arithmetic of one rank: products, activations, norms, sums. It knows nothing of grids."""
