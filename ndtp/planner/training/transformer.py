"""`Transformer`: the sizes of a model that a training step depends on.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ndtp.planner.block_cost import Block
from ndtp.planner.model_sizes import Mixture


@dataclass(frozen=True)
class Transformer:
    """A stack of layers that are alike, between an embedding and a head.

    Attributes:
        head_size: features of one head; 0: hidden / heads.
        value_size: those of its values; 0: as many.
        latent: where latent vectors lie between hidden features and queries, keys and values: the width of one product
            that costs as much as theirs; 0: there are none.
        kv_heads: 0: as many as heads.
        gated: whether the MLP has a gate beside its up projection.
        tied: whether the head has the embedding's weight.
        causal: whether a token attends to those before it alone.
        window: tokens that one attends to at most; 0: all of the sequence.
        parallel: whether attention and MLP read one norm side by side.
        mixture: experts instead of the MLP, in `mixture.layers` of the layers.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    head_size: int = 0
    value_size: int = 0
    latent: int = 0
    gated: bool = False
    tied: bool = False
    causal: bool = True
    window: int = 0
    parallel: bool = False
    mixture: Mixture | None = None
    name: str = "transformer"

    @classmethod
    def of(cls, name: str, blocks: Sequence[Block], sequence: int) -> Transformer | None:
        """Return the transformer of these blocks, trained on sequences of that length.

        The result is None unless the blocks are one stack of layers between an embedding and a head.
        """
        attention = [block for block in blocks if block.heads and block.inner]
        mixtures = [block for block in blocks if block.experts]
        ends = [block for block in blocks if block.looked_up and block.outs]
        plain = [block for block in blocks if block.inner and not block.heads and not block.experts]
        rest = [block for block in blocks if block not in (*attention, *mixtures, *ends, *plain)]
        if len(attention) != 1 or len(ends) != 1 or rest or len(mixtures) > 1 or not (plain or mixtures):
            return None
        core, layers = attention[0], attention[0].times
        sparse = mixtures[0].times if mixtures else 0
        shared = [
            block for block in plain if mixtures and block.times == sparse and (sparse == layers or len(plain) > 1)
        ]
        dense = [block for block in plain if block not in shared]
        if len(dense) > 1 or len(shared) > 1 or sum(block.times for block in dense) + sparse != layers:
            return None
        heads, mlp = core.heads[0], (dense or shared or mixtures)[0]
        mixture = None
        if mixtures:
            of = mixtures[0]
            mixture = Mixture(sparse, of.experts, of.top_k, of.inner, shared[0].inner if shared else 0)
        return cls(
            layers, core.hidden, mlp.inner, heads, ends[0].looked_up, sequence, core.key_heads or heads,
            core.inner // heads, gated=len(mlp.outs) == 2, tied=ends[0].tied, mixture=mixture, name=name,
        )  # fmt: skip

    @staticmethod
    def why_not(blocks: Sequence[Block]) -> str:
        """Return the reason why `of` makes no transformer of these blocks."""
        attention = [block for block in blocks if block.heads and block.inner]
        ends = [block for block in blocks if block.looked_up and block.outs]
        inside = [block for block in blocks if block.inner and not block.heads]
        if not attention:
            return "it has no attention, or one that is not planned, such as by latent vectors"
        if len(attention) > 1:
            return f"it has attention of {len(attention)} kinds, as an encoder beside a decoder or unlike layers have"
        if not ends:
            return "it has no embedding of tokens with a head"
        if not inside:
            return "it has no MLP or experts"
        times = " and ".join(f"{block.times} of {block.name}" for block in inside)
        return f"its layers are not alike: {attention[0].times} of attention, {times}"

    @property
    def head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def keys(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def attended(self) -> float:
        """Pairs of tokens, per token of the sequence, that attention must multiply."""
        reach = min(self.window or self.sequence, self.sequence)
        return reach - reach * reach / (2 * self.sequence) if self.causal else float(reach)

    def attention(self, tokens: int) -> Block:
        block = Block.attention(tokens, self.hidden, self.heads, self.keys, self.head)
        if self.latent:
            block = replace(block, outs=(self.latent,))
        return replace(block, inner=self.heads * self.value_size) if self.value_size else block

    def mlp(self, tokens: int) -> Block:
        return Block.mlp(tokens, self.hidden, self.ffn, self.gated)

    def experts(self, tokens: int) -> Block:
        assert self.mixture is not None
        of = self.mixture
        return Block.moe(tokens, self.hidden, of.ffn, of.count, of.top_k, self.gated)

    def shared(self, tokens: int) -> Block | None:
        """The MLP beside experts."""
        if self.mixture is None or not self.mixture.shared:
            return None
        return replace(Block.mlp(tokens, self.hidden, self.mixture.shared, self.gated), name="shared expert")

    def ends(self, tokens: int) -> Block:
        """The embedding and the head."""
        return Block.vocabulary(tokens, self.hidden, self.vocabulary, self.tied)

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """The blocks of all layers, each `times` its number; the embedding and the head are not among them."""
        sparse = self.mixture.layers if self.mixture else 0
        found = [replace(self.attention(tokens), times=self.layers)]
        if sparse < self.layers:
            found.append(replace(self.mlp(tokens), times=self.layers - sparse))
        if sparse:
            found.append(replace(self.experts(tokens), times=sparse))
            shared = self.shared(tokens)
            found += [replace(shared, times=sparse)] if shared else []
        return tuple(found)

    @property
    def parameters(self) -> int:
        """The number of parameters that are matrices."""
        return sum(block.times * block.parameters for block in (*self.blocks(1), self.ends(1)))

    @property
    def active(self) -> int:
        """Parameters of products that one token goes through, the head included."""
        found = self.vocabulary * self.hidden
        for block in self.blocks(1):
            one = block.hidden * (sum(block.outs) + block.inner)
            found += block.times * one * (block.top_k if block.experts else 1)
        return found

    @property
    def last(self) -> float:
        """The part of a layer's products that its last one has."""
        mlp, attention = self.mlp(1), self.attention(1)
        if self.mixture is not None:
            return 0.0  # behind it rows are sent back
        return self.ffn * self.hidden / (mlp.parameters + attention.parameters)

    @property
    def in_mlp(self) -> float:
        """The part of a layer's products that its MLP has, or its experts of one token."""
        mixed = self.experts(1) if self.mixture else None
        mlp = mixed.hidden * (sum(mixed.outs) + mixed.inner) * mixed.top_k if mixed else self.mlp(1).parameters
        return mlp / (mlp + self.attention(1).parameters)

    @property
    def flops(self) -> float:
        """Return the flops of a token, forward and backward, as published figures count them.

        They are 6 a parameter of the products, and attention to the whole sequence, causal or not.
        """
        return 6.0 * self.active + 12.0 * self.layers * self.heads * self.head * self.sequence
