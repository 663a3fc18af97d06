"""Collectives with handles: one class a backend, and what names, counts, times and compares them."""
