"""What one rank calculates: products, activations, sums.  Knows nothing of grids."""
