"""A grid bound to process groups, and what runs the tasks of a plan on it."""
