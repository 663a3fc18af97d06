"""A training step of a whole model: how long it takes, what memory it needs, and how to split it.  Pure, no torch."""
