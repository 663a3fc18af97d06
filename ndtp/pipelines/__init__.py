"""Stages of a model on grids of their own: torch's pipeline schedules over exact moves between any two grids."""
