"""The GEMMs as custom ops, with their gradients."""
