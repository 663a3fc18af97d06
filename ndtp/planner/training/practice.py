"""`Practice`: what the software that trains does, by features that its documents name.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ndtp.algebra.wire import Wire
from ndtp.errors import GridError
from ndtp.planner.fields import Kind, Number, Word

# What backward makes again: parts of the layers' products, of their attention cores, and whether it stops before each
# layer's last product, whose result nothing needs (torch's non-reentrant checkpoints do, Megatron's do not).
RECOMPUTE = {
    "none": (0.0, 0.0, False),
    "activations": (0.0, 0.0, False),  # norms and activations, by bytes
    "latent": (0.1, 0.0, False),  # queries, keys and values from latent vectors, norms and activations
    "mlp": (0.0, 0.0, True),  # all of an MLP but its last product: how much depends on the model
    "selective": (0.0, 1.0, False),  # attention cores alone (Korthikanti et al. 2022); flash kernels do so anyway
    "products": (0.5, 0.0, False),  # every other product, and what lies between (torchtitan's "selective op")
    "layers": (0.5, 0.5, True),  # every other layer
    "layer": (1.0, 1.0, True),
    "full": (1.0, 1.0, False),
}
ATTENTION = ("core", "flash1", "flash2", "flash3", "fused")
GRAPHS = ("none", "layers", "step")
FIELDS: dict[str, Kind] = {
    "dtype": Word(("bfloat16", "float16", "float32", "float8")),
    "attention": Word(ATTENTION),
    "recompute": Word(tuple(RECOMPUTE)),
    "tensor_chunks": Number(1, 1024, integer=True),
    "reduce_bytes": Number(1, 8, integer=True),
    "imbalance": Number(1, 1000),
    "loss_rows": Number(0, 2**31, integer=True),
    "optimizer_ranks": Number(1, 2**20, integer=True),
    "graphs": Word(GRAPHS),
    "expert_nodes": Number(0, 2**20, integer=True),
}


@dataclass(frozen=True)
class Practice:
    """The features of the software that runs a training step.

    Attributes:
        dtype: the dtype of the layers' products; "float8" leaves attention cores, head and everything else in bf16.
        attention: the kernel: "core" writes scores to memory, "flash1" to "flash3" are those generations of
            FlashAttention, "fused" is the vendor's own, as fast as the chip's best.
        fused: whether norms, activations, rotary embeddings and losses are fused or compiled kernels.
        recompute: see `RECOMPUTE`.
        sequence_parallel: whether norms and residuals work on rows split over the tensor-parallel ranks.
        dropout: whether attention and residuals have dropout.
        tensor_chunks: pieces in which tensor-parallel collectives run beside products; 1: products wait for them.
        overlap_weights: whether z's gathers and scatters run beside the layers before.
        regather: whether weights over z are given back after forward, and gathered again.
        overlap_data: whether data-parallel sums run beside the last micro-batch's backward.
        overlap_stages: whether pipeline stages send beside their products.
        shard_optimizer: whether the optimizer is sharded over the data-parallel ranks (ZeRO-1), by reduce-scatter and
            all-gather instead of all-reduce.
        optimizer_ranks: ranks over which an optimizer's state is split where its gradients are summed by all-reduce.
        gather_context: whether context parallelism gathers keys and values before attention, instead of passing them
            round.
        reduce_bytes: bytes of an element of gradients as they are kept and summed, for weights of two bytes.
        keeps_gathered: whether gathered activations are kept for backward, and not gathered again.
        loss_in_place: whether the gradient of logits is written over them, in their dtype.
        loss_rows: rows of logits at a time, whose gradient is made at once; 0: all rows, and backward makes it.
        imbalance: rows of the fullest rank of experts, over the mean.
        wire: the dtypes in which operands of products and gradients travel.
        fold_experts: whether tensor-parallel ranks have experts of their own instead of a part of each, where their
            number allows it.
        once_per_node: whether a token that several experts of a node want is sent there once, and spread inside of it.
        expert_nodes: nodes that a router may choose for one token; 0: any number.
        overlap_experts: whether rows travel to experts beside the layers of another micro-batch.
        graphs: what the host starts as a CUDA graph: "layers" are all but what experts compute, "step" is everything.
    """

    dtype: str = "bfloat16"
    attention: str = "fused"
    fused: bool = True
    recompute: str = "none"
    sequence_parallel: bool = True
    dropout: bool = False
    tensor_chunks: int = 1
    overlap_weights: bool = True
    regather: bool = True
    overlap_data: bool = True
    overlap_stages: bool = True
    shard_optimizer: bool = True
    optimizer_ranks: int = 1
    gather_context: bool = False
    reduce_bytes: int = 4
    keeps_gathered: bool = False
    loss_in_place: bool = False
    loss_rows: int = 0
    imbalance: float = 1.0
    wire: Wire | None = None
    fold_experts: bool = False
    once_per_node: bool = False
    expert_nodes: int = 0
    overlap_experts: bool = False
    graphs: str = "none"

    def __post_init__(self) -> None:
        for name, kind in FIELDS.items():
            kind.check("Practice", name, getattr(self, name))
        if self.attention == "core" and self.gather_context:
            raise GridError("Practice: attention='core' writes all scores; context parallelism needs a flash kernel")

    @property
    def recomputed(self) -> tuple[float, float, bool]:
        """Parts of the products and of the attention cores that backward makes again; whether all but the last."""
        products, cores, stops = RECOMPUTE[self.recompute]
        return products, cores if self.attention == "core" or self.recompute != "selective" else 0.0, stops


# As their documents say; what a request may name.
PRACTICES = {
    # ndtp on stock models of transformers: torch's attention, norms and rotary embeddings as the model has them.
    "ndtp": Practice(
        attention="flash2", fused=False, tensor_chunks=4, regather=False, shard_optimizer=False, overlap_stages=False,
        reduce_bytes=2, keeps_gathered=True, loss_rows=1024,
    ),
    "megatron": Practice(attention="fused", tensor_chunks=4, once_per_node=True, fold_experts=True),
    "torchtitan": Practice(attention="flash2", recompute="products", shard_optimizer=False),
}  # fmt: skip
