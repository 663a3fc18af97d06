"""Modules: `nn.Linear` and MatMul -> activation -> MatMul on a grid of processes."""

from ndtp.compute.rotary import Rotary
from ndtp.nn.as_dense import as_dense
from ndtp.nn.attention import Attention
from ndtp.nn.attention_dense import DenseAttention, KVCache
from ndtp.nn.dropout import Dropout
from ndtp.nn.embedding import Embedding
from ndtp.nn.gated import GatedMLP
from ndtp.nn.gradients import accumulate_in_fp32, clip_grad_norm_, sum_plain_gradients
from ndtp.nn.linear import Linear
from ndtp.nn.losses import CrossEntropy, LinearCrossEntropy, cross_entropy, linear_cross_entropy
from ndtp.nn.mlp import MLP
from ndtp.nn.moe import MoE
from ndtp.nn.norms import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "Attention",
    "CrossEntropy",
    "DenseAttention",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MoE",
    "RMSNorm",
    "Rotary",
    "accumulate_in_fp32",
    "as_dense",
    "clip_grad_norm_",
    "cross_entropy",
    "linear_cross_entropy",
    "sum_plain_gradients",
]
