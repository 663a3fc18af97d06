"""A training step of a whole model: how long it takes, what memory it needs, and how to split it.  Pure, no torch."""

from ndtp.planner.training.practice import Practice
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.step import StepTime, TrainingJob
from ndtp.planner.training.transformer import Transformer

__all__ = ["Practice", "Splits", "StepTime", "TrainingJob", "Transformer"]
