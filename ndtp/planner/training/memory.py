"""The memory that a training step needs on a rank. Pure.

Kept from forward to backward, per token and layer, are the tensors that products, norms, activations and the attention
core need again: for features of a layer that lie as the 3D scheme says, each tensor once, and what was gathered as it
was gathered.  Of stages, the first one holds the most micro-batches at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ndtp.planner.grids import PerGrid
from ndtp.planner.training.practice import Practice
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.transformer import Transformer

# Bytes of an optimizer's state per parameter, at weights of four bytes and of two (with the fp32 copy of these).
OPTIMIZERS = {"none": (0, 0), "sgd": (0, 4), "momentum": (4, 8), "adamw": (8, 12)}

# Bytes of a logit that a loss has at a time: itself, its probability and its gradient, in fp32, or itself alone.
LOGITS, LOGITS_IN_PLACE = 12.0, 4.0


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the fullest rank.

    Attributes:
        activations: kept from forward to backward, of all micro-batches that are under way at a time.
        buffers: what the loss or a layer works on for a moment, and weights that were gathered for it.
        stays: whether gradients are there before backward begins: they are summed over micro-batches, or have a buffer.
    """

    weights: PerGrid
    gradients: PerGrid
    optimizer: PerGrid
    activations: PerGrid
    buffers: PerGrid
    stays: PerGrid = True

    @property
    def total(self) -> PerGrid:
        """The memory at the worst moment, since gradients of backward take the place of activations that it frees."""
        passing = self.activations + self.buffers
        worst = np.where(self.stays, self.gradients + passing, np.maximum(self.gradients, passing))
        return self.weights + self.optimizer + worst

    def parts(self) -> dict[str, float]:
        names = ("weights", "gradients", "optimizer", "activations", "buffers")
        return {name: float(getattr(self, name)) for name in names}


def held(model: Transformer, s: Splits) -> PerGrid:
    """Parameters of the fullest stage, on a rank."""
    found: PerGrid = 0.0
    for block in model.blocks(1):
        found = found + block.times * block.parameters / (s.e if block.experts else 1)
    both = model.ends(1).parameters
    ends = np.where(np.asarray(s.pp) > 1, model.vocabulary * model.hidden, both)
    norms = (2 * model.layers + 1) * model.hidden
    return (found * deepest(model, s) / model.layers + ends) / (s.z * s.x * s.y) + norms / s.pp / s.x


def optimizer_ranks(practice: Practice, s: Splits) -> PerGrid:
    """Ranks with the same weights that share an optimizer's state."""
    return s.replicas if practice.shard_optimizer else np.minimum(practice.optimizer_ranks, s.replicas)


def deepest(model: Transformer, s: Splits) -> PerGrid:
    """Layers of the stage that has the most."""
    return -(-model.layers // s.pp)


def memory(model: Transformer, batch: int, practice: Practice, s: Splits, optimizer: str = "adamw") -> StepMemory:
    size = 4.0 if practice.dtype == "float32" else 2.0
    parameters = held(model, s)
    state = OPTIMIZERS[optimizer][0 if size == 4 else 1]
    copies = optimizer_ranks(practice, s)
    gradient = size if size == 4 else float(practice.reduce_bytes)
    tokens = s.micro * model.sequence / s.cp  # that the ranks along x and y work on together
    spread = s.x * s.y
    layers = deepest(model, s)
    per_layer = _kept(model, practice, s, tokens, False)
    whole = _kept(model, practice, s, tokens, True)
    gathered = _gathered(model, s)
    micros = np.maximum(1, -(-batch // (s.shares * s.micro)))
    pipe = np.where(np.asarray(s.virtual) > 1, s.pp + (s.pp - 1) / s.virtual, s.pp)
    outside, head = tokens * model.hidden / spread, model.vocabulary * model.hidden / spread
    early = np.asarray(practice.loss_rows > 0)  # such a loss makes the head's gradient in forward
    ends = 3 * outside + np.where(early & (np.asarray(s.pp) == 1), head, 0.0)
    kept = np.minimum(micros, pipe) * layers * per_layer + ends + (not practice.regather) * layers * gathered
    over_z = np.asarray(s.z) > 1
    # A layer whose activations are made again has all of them for a moment; gradients over z are whole before a sum.
    layer = whole - per_layer + _working(model, s, tokens) + np.where(over_z, _whole(model, s), 0.0)
    rows = np.minimum(tokens, practice.loss_rows) if practice.loss_rows else tokens
    logits = LOGITS_IN_PLACE if practice.loss_in_place else LOGITS
    loss = logits / size * rows * model.vocabulary / spread + s.y * outside + np.where(over_z, head, 0.0)
    return StepMemory(
        weights=parameters * size,
        gradients=parameters * gradient,
        optimizer=parameters * state / copies,
        activations=kept * size,
        buffers=(np.maximum(layer, loss) + practice.regather * 2 * gathered) * size,
        stays=(micros > 1) | (gradient > size),
    )


def _kept(model: Transformer, practice: Practice, s: Splits, tokens: object, everything: bool) -> PerGrid:
    """Elements of one micro-batch that one layer keeps; `everything` that it would keep if nothing were made again."""
    split = tokens / (s.x * s.y)
    heads, keys = model.heads * model.head, model.keys * model.head
    again = "none" if everything else practice.recompute
    # What enters products in 8 bits is kept so.
    entering = 0.5 if practice.dtype == "float8" else 1.0
    inputs = split * model.hidden  # of the layer
    norms = (1 if model.parallel else 2) * (s.y if practice.keeps_gathered else 1) * entering
    x = s.x if practice.keeps_gathered else 1
    between, results = split * model.hidden, split * model.hidden * norms
    attention, out = split * (heads + 2 * keys), split * x * model.heads * (model.value_size or model.head)
    scores = split * model.heads * model.sequence if practice.attention == "core" else split * model.heads * 2
    mask = split * model.heads * model.sequence * 1.5 if practice.attention == "core" and practice.dropout else 0.0
    mlp: PerGrid = 0.0
    activated: PerGrid = 0.0
    for block in model.blocks(1):
        if block.name == "attention":
            continue
        part = block.times / model.layers * block.top_k * split
        mlp, activated = mlp + part * sum(block.outs), activated + part * x * block.inner * entering
        if block.experts:  # rows in the order of experts, and, where gates multiply them at the end, as they came back
            mlp = mlp + part * model.hidden * (entering + (not practice.fused))
    rest = {"products": 0.5, "layers": 0.5, "layer": 0.0, "full": 0.0}.get(again)
    if rest is not None:
        return inputs + rest * (between + results + attention + out + mlp + activated)
    if again in ("activations", "latent"):
        results, activated = 0.0, 0.0
    if again == "latent":
        attention = split * model.latent / 4  # the vectors themselves, narrower than what leads out of them
    if again == "mlp":
        mlp, activated = 0.0, 0.0
    if again == "selective":
        scores, mask = split * model.heads * 2, 0.0
    return inputs + between + results + attention + out + scores + mask + mlp + activated


def _gathered(model: Transformer, s: Splits) -> PerGrid:
    """Elements of a layer's weights that are kept beside their shard: gathered over z, or joined side by side."""
    joined: PerGrid = 0.0
    for block in model.blocks(1):
        if len(block.outs) > 1:
            part = block.parameters * sum(block.outs) / (sum(block.outs) + block.inner)
            joined = joined + block.times / model.layers * part / (s.e if block.experts else 1)
    return np.where(np.asarray(s.z) > 1, _whole(model, s), joined / (s.x * s.y))


def _whole(model: Transformer, s: Splits) -> PerGrid:
    """Elements of a layer's weights, as z gathers them."""
    found: PerGrid = 0.0
    for block in model.blocks(1):
        found = found + block.parameters * block.times / model.layers / (s.e if block.experts else 1)
    return found / (s.x * s.y)


def _working(model: Transformer, s: Splits, tokens: object) -> PerGrid:
    """Elements of the largest gradients of a layer's backward: those of an MLP, and what is gathered for them."""
    wide = max((sum(block.outs) + block.inner) * block.top_k for block in model.blocks(1) if block.name != "attention")
    return tokens / (s.x * s.y) * (wide + 2 * s.y * model.hidden)
