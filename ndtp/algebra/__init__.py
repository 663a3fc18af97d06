"""How tensors lie on a grid, what each product of them moves, and how many bytes.  Pure."""
