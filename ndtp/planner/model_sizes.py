"""A model as the planner sees it: blocks, each as often as it is there.  Pure.

`Stack`s and `ModelSizes` are what `ndtp.planner.model_config` reads in a file; a `CountedModel` is what
`ndtp.models.counted` finds in the model itself, which transformers builds of that file without memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ndtp.planner.block_cost import Block


def cross_attention(tokens: int, hidden: int, heads: int, kv_heads: int, head: int) -> tuple[Block, Block]:
    """Queries and the way out of the heads as one block; keys and values, which are of other rows, as another."""
    inner, keys = heads * head, kv_heads * head
    return (
        Block(tokens, hidden, (inner,), inner, (heads,), name="cross attention"),
        Block(tokens, hidden, (keys, keys), 0, (), kv_heads, 2 * keys, "cross keys"),
    )


@dataclass(frozen=True)
class Mixture:
    """Experts instead of an MLP, in some layers of a stack.

    Attributes:
        layers: how many have them.
        count, top_k, ffn: how many experts, those of a token, and features inside of each.
        shared: features of the MLP beside them that all tokens go through.
        gate: whether a gate of one feature weighs that one.
    """

    layers: int
    count: int
    top_k: int
    ffn: int
    shared: int = 0
    gate: bool = False


@dataclass(frozen=True)
class Stack:
    """Layers that are alike, one after the other.

    Attributes:
        crosses: whether each attends to the encoder, too.
        mixture: of experts, in some of them.
        latent: whether attention goes by latent vectors, which is not counted.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_size: int
    crosses: bool = False
    mixture: Mixture | None = None
    latent: bool = False

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """Return the blocks that the planner weighs, each `times` the number of layers."""
        found: list[Block] = []
        if not self.latent:
            found.append(Block.attention(tokens, self.hidden, self.heads, self.kv_heads, self.head_size))
        if self.crosses:
            found += cross_attention(tokens, self.hidden, self.heads, self.kv_heads, self.head_size)
        mlp, of = Block.mlp(tokens, self.hidden, self.ffn, self.gated), self.mixture
        if of is None:
            return tuple(replace(block, times=self.layers) for block in (*found, mlp))
        found = [replace(block, times=self.layers) for block in found]
        found += [replace(mlp, times=self.layers - of.layers)] * (of.layers < self.layers)
        experts = Block.moe(tokens, self.hidden, of.ffn, of.count, of.top_k, self.gated, whole_scores=True)
        shared = [replace(Block.mlp(tokens, self.hidden, of.shared, self.gated), name="shared expert")] * bool(
            of.shared
        )
        return (*found, *(replace(block, times=of.layers) for block in (experts, *shared)))


@dataclass(frozen=True)
class ModelSizes:
    """A model as the planner sees it.

    Attributes:
        vocabulary, width: rows of its embedding and their features; 0: it has none.
        head: whether features become logits of the vocabulary at its end, and `tied` whether by the embedding's weight.
        left_out: parts that the file describes and that are not counted.
    """

    kind: str
    stacks: tuple[Stack, ...]
    vocabulary: int
    width: int
    head: bool
    tied: bool
    left_out: tuple[str, ...] = ()

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """Return the blocks of a step of `tokens` rows in each of the model's stacks."""
        found = [block for stack in self.stacks for block in stack.blocks(tokens)]
        if self.vocabulary:
            found.append(Block.vocabulary(tokens, self.width, self.vocabulary, self.tied, self.head))
        return tuple(found)

    @property
    def parameters(self) -> int:
        """The number of weights that are matrices; biases, norms and positions are not counted."""
        gates = sum(s.hidden * s.mixture.layers * s.mixture.gate for s in self.stacks if s.mixture)
        return gates + sum(block.times * block.parameters for block in self.blocks(1))


@dataclass(frozen=True)
class CountedModel:
    """The blocks and parameters that were counted in a model.

    Attributes:
        kind: its class, and what built it.
        found: its blocks, of one token.
        parameters: elements of all of its parameters, each once.
        planned: of those, how many are the weights of its blocks.
        beside: names of what else has parameters, and how many; alike ones of numbered layers as one.
    """

    kind: str
    found: tuple[Block, ...]
    parameters: int
    planned: int
    beside: tuple[tuple[str, int], ...]

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """Return the blocks of a step of `tokens` rows in each of the model's stacks."""
        return tuple(replace(block, tokens=tokens) for block in self.found)
