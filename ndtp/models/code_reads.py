"""`CodeReads`: the parameters that a model's own code has read in one forward, and what the code did to them.

The code gets a plain tensor for a parameter that every rank has whole.  Where it puts other memory in the place of that
tensor's, as `self.scale.data = self.scale.data.clamp(max=100)` does in models with a temperature, the parameter takes
the numbers: before it is read again, and at the end of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ndtp.errors import LayoutError
from ndtp.runtime.arrival import is_plain, local_of
from ndtp.runtime.versions import refuse_changed, version_of


class CodeReads:
    """The parameters that one forward has read.

    Attributes:
        read: these and their names, by their ids; None: there are none.
    """

    read: dict[int, tuple[Tensor, str]] | None = None  # of the class, so that a forward without reads makes nothing
    _plain: dict[int, tuple[Tensor, int, int]]  # what stood for each last, where it lay, and its version

    def note(self, parameter: Tensor, name: str) -> None:
        if self.read is None:
            self.read, self._plain = {}, {}
        self.read[id(parameter)] = parameter, name

    def stands_for(self, plain: Tensor, parameter: Tensor) -> Tensor:
        """Note that the code gets a plain tensor in the place of a parameter, and return it."""
        if type(plain) is Tensor and not plain.is_meta and not is_plain(parameter):
            self._plain[id(parameter)] = plain, plain.data_ptr(), plain._version
        return plain

    def take_back(self, parameter: Tensor) -> None:
        """Put what the code has put in the place of a parameter into the parameter.

        Raises:
            LayoutError: it is no tensor of its sizes.
        """
        from ndtp.runtime.grid_parts import part_of
        from ndtp.runtime.whole_operations import wrote

        if self.read is None or id(parameter) not in self._plain:
            return
        own: Any = parameter
        plain, address, version = self._plain[id(parameter)]
        memory = local_of(parameter).untyped_storage()._cdata
        is_written = plain._version != version and plain.untyped_storage()._cdata != memory
        if plain.data_ptr() == address and not is_written:
            return
        if plain.shape != own.shape:
            name = self.read[id(parameter)][1]
            raise LayoutError(
                f"parallelize: the model's code changes {name}, {tuple(own.shape)}, by a tensor "
                f"{tuple(plain.shape)}, of which a rank has another part\n"
                "  fix: change parameters outside of forward, or name the layer in keep="
            )
        with torch.no_grad():
            own._local_tensor.copy_(part_of(plain.detach(), own._dtensor))
        wrote(type(own), own)
        self._plain[id(parameter)] = plain, plain.data_ptr(), plain._version

    def watch(self, given: Any, left_out: type | tuple[type, ...] = ()) -> None:
        """End: what the forward gave refuses a backward behind other changes of what the code has read.

        Args:
            given: what the forward gave.
            left_out: kinds of tensors that do not know yet how they are made.
        """
        found = [*self.read.values()] if self.read else []
        for parameter, _ in found:
            self.take_back(parameter)
        read = [(parameter, version_of(parameter), name) for parameter, name in found]
        self._plain = {}
        if read and not torch.compiler.is_compiling():
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and not isinstance(x, left_out) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(partial(_refuse_changed, read))


def note_read(running: Sequence[CodeReads | None], parameter: Tensor, name: str) -> CodeReads:
    """Note that code reads a parameter, behind what code of this forward or of one around it has done to it."""
    for each in running:
        if each is not None:
            each.take_back(parameter)
    innermost = running[-1]
    assert innermost is not None
    innermost.note(parameter, name)
    return innermost


def _refuse_changed(read: Sequence[Any], _: Any) -> None:
    for each in read:
        refuse_changed(*each)
