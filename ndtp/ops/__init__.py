"""What modules call, on shards: products, relayouts, reductions, lookups, norms and losses, all differentiable.

Beside them what moves a tensor that no gradient flows through, and the memory that a step takes.
"""
