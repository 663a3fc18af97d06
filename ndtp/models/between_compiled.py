"""Tells a compiler that is there of a kind of tensor, `Between`; imported once it is, since importing it takes seconds.

A graph follows what lies between by itself.  Where it breaks between the layers of a pair, code that gets a `Between`
runs eagerly: the compiler would take its sizes, those of the whole, for those of its memory.
"""

import torch._dynamo.config

from ndtp.collectives.torch_patches import in_place


@torch._dynamo.assume_constant_result  # runs while the compiler traces, and leaves nothing in the graph
def make_known(kind: type) -> None:
    in_place("torch._dynamo.config.nontraceable_tensor_subclasses").add(kind)
