"""The differentiable door from tensors to collectives: products, relayouts, the memory that they take."""
