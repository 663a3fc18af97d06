"""How tensors lie on a grid, what each product of them moves, and how many bytes.

Pure: nothing here moves or changes a tensor.  `Layout.shard` gives a view of what it is handed.
"""
