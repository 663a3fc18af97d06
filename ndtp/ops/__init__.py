"""Differentiable operations on shards that modules call: products, relayouts, reductions, lookups, norms and losses.

Beside them what moves a tensor that no gradient flows through, and the memory that a step takes.
"""
