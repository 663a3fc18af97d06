"""Layouts of tensors on a grid, plans of products, what each product moves, and how many bytes.

Pure: nothing here moves or changes a tensor.  `Layout.shard` gives a view of what it is handed.
"""
