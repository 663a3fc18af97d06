"""Modules: `nn.Linear` and MatMul -> activation -> MatMul on a grid of processes."""

from ndtp.nn.dropout import Dropout
from ndtp.nn.gated import GatedMLP
from ndtp.nn.gradients import clip_grad_norm_, sum_plain_gradients
from ndtp.nn.linear import Linear
from ndtp.nn.mlp import MLP

__all__ = ["MLP", "Dropout", "GatedMLP", "Linear", "clip_grad_norm_", "sum_plain_gradients"]
