"""`CodeReads`: the parameters that a model's own code has read in one forward, and what the code did to them.

The code gets a plain tensor for a parameter that every rank has whole.  Where it puts other memory in the place of that
tensor's, as `self.scale.data = self.scale.data.clamp(max=100)` does in models with a temperature, the parameter takes
the numbers: before it is read again, and at the end of the forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import is_plain, local_of
from ndtp.runtime.versions import refuse_changed, version_of
from ndtp.split.tensor import SplitTensor

# Of a tensor on the grid, of DTensor, and of a split tensor.
OWN_ATTRIBUTES = {
    "_dtensor", "_is_param", "_local_tensor", "_spec", "spec", "passage", "link", "strides", "repeats", "stands_for",
}  # fmt: skip
_NO_TREES = (Tensor, bool, int, float, str, type(None))
_STEPS = 64  # of a graph, through which what an input was made of is looked for


class StandIn(NamedTuple):
    """A tensor that code gets in the place of a parameter.

    Attributes:
        place, version: where it lay when it was made, and how often it had been written to.
        of_parameter: what changes when the parameter is written to otherwise.
        has_grad: whether it was made with gradients.
    """

    plain: Tensor
    place: int
    version: int
    of_parameter: tuple[int, ...]
    has_grad: bool


def wants_gradients(args: Arguments, kwargs: Keywords) -> bool:
    """Return whether a call gets a leaf that wants a gradient, or what was made of one, and gives it a graph."""
    if not torch.is_grad_enabled():
        return False
    given = [*args, *kwargs.values()]
    # Tensors side by side, as most calls give them, are no tree: to walk one takes several times as long.
    leaves = given if all(isinstance(x, _NO_TREES) for x in given) else tree_leaves(given)
    return any(isinstance(x, Tensor) and x.requires_grad and (x.is_leaf or _is_made_of_a_leaf(x)) for x in leaves)


def _is_made_of_a_leaf(x: Tensor) -> bool:
    """Return whether one of the last steps to an input began with a leaf that is no parameter: `cat([x, t])`.

    What a whole model has made of a leaf is not looked through: it takes more steps.
    """
    waiting, seen = deque([x.grad_fn]), set[Any]()
    while waiting and len(seen) < _STEPS:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            return True
        waiting.extend(before for before, _ in node.next_functions)
    return False


class CodeReads:
    """The parameters that one forward has read.

    Attributes:
        read: these and their names, by their ids; None: there are none.
        wants_inputs: whether the forward was given a leaf that wants a gradient, which often has one of its own then.
    """

    wants_inputs = False

    read: dict[int, tuple[Tensor, str]] | None = None  # of the class, so that a forward without reads makes nothing
    _stand_ins: dict[int, StandIn]  # for each the last one
    # By a parameter's id: it, the class and attributes of what stands for it (not the tensor, which may go), and what
    # these were.
    _attributes: dict[int, list[tuple[Tensor, type, dict[str, object], dict[str, object]]]]

    def note(self, parameter: Tensor, name: str) -> None:
        if self.read is None:
            self.read, self._stand_ins, self._attributes = {}, {}, {}
        self.read[id(parameter)] = parameter, name

    def stand_in_of(self, parameter: Tensor) -> StandIn | None:
        return None if self.read is None else self._stand_ins.get(id(parameter))

    def stands_for(self, plain: Tensor, parameter: Tensor) -> Tensor:
        """Note that the code gets a plain tensor in the place of a parameter, and return it."""
        if type(plain) is Tensor and not plain.is_meta and not is_plain(parameter):
            made = StandIn(plain, plain.data_ptr(), plain._version, version_of(parameter), torch.is_grad_enabled())
            self._stand_ins[id(parameter)] = made
        if plain is not parameter:
            self.carry_attributes(parameter, plain)
        return plain

    def carry_attributes(self, parameter: Tensor, x: Tensor) -> None:
        """Give what stands for a parameter the attributes that the model's code has put on the parameter."""
        own, carried = vars(x), _of_code(parameter, type(x))
        if type(x) is Tensor:
            for key in _of_code(x, Tensor).keys() - carried.keys():
                del own[key]  # of an earlier forward, where the shard itself stands for the parameter
        own.update(carried)
        self._attributes.setdefault(id(parameter), []).append((parameter, type(x), own, carried))

    def take_attributes_back(self, parameter: Tensor) -> None:
        """Give a parameter the attributes that code has changed on what stands for it."""
        for _, kind, own, carried in self._attributes.get(id(parameter), ()):
            found = {key: value for key, value in own.items() if key in carried or _is_of_code(key, kind)}
            for key in carried.keys() - found.keys():
                del carried[key]
                vars(parameter).pop(key, None)
            for key, value in found.items():
                if key not in carried or carried[key] is not value:
                    carried[key] = vars(parameter)[key] = value

    def take_back(self, parameter: Tensor) -> None:
        """Put what the code has put in the place of a parameter into the parameter.

        Raises:
            LayoutError: it is no tensor of its sizes.
        """
        stand_in, own = self.stand_in_of(parameter), cast(Any, parameter)
        if stand_in is None:
            return
        plain, memory = stand_in.plain, local_of(parameter).untyped_storage()._cdata
        is_written = plain._version != stand_in.version and plain.untyped_storage()._cdata != memory
        if plain.data_ptr() == stand_in.place and not is_written:
            return
        from ndtp.runtime.grid_parts import part_of
        from ndtp.runtime.whole_operations import wrote

        if (plain.shape, plain.dtype, plain.device) != (own.shape, own.dtype, own.device):
            name = (self.read or {})[id(parameter)][1]
            raise LayoutError(
                f"parallelize: the model's code changes {name}, {tuple(own.shape)} of {own.dtype}, by a tensor "
                f"{tuple(plain.shape)} of {plain.dtype}, which is no whole one of its kind\n"
                "  fix: change parameters outside of forward"
            )
        own._local_tensor.data = part_of(plain.detach(), own._dtensor)  # what was computed has the memory of before
        if not own.is_inference():
            torch.autograd.graph.increment_version([own])  # or ranks that write alone would not be seen
        wrote(type(own), own)
        self._stand_ins[id(parameter)] = stand_in._replace(
            place=plain.data_ptr(), version=plain._version, of_parameter=version_of(parameter)
        )

    def watch(self, given: object, left_out: type | tuple[type, ...] = ()) -> None:
        """End: what the forward gave refuses a backward behind other changes of what the code has read.

        Args:
            given: what the forward gave.
            left_out: kinds of tensors that do not know yet how they are made.
        """
        # A split tensor that was computed in a parameter's place is nobody's to change.
        found = [each for each in self.read.values() if not isinstance(each[0], SplitTensor)] if self.read else []
        for parameter, _ in found:
            self.take_back(parameter)
            self.take_attributes_back(parameter)
        self._attributes = {}
        read = [(parameter, version_of(parameter), name) for parameter, name in found]
        self._stand_ins = {}
        if read and not torch.compiler.is_compiling():
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and not isinstance(x, left_out) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(partial(_refuse_changed, read))


def _of_code(x: Tensor, kind: type) -> dict[str, object]:
    """Return the attributes of a tensor that are of the model's code, and that a tensor of a class can have."""
    keys = [key for key in vars(x) if not key.startswith("ndtp_") and key not in OWN_ATTRIBUTES]
    return {key: vars(x)[key] for key in keys if _is_of_code(key, kind)} if keys else {}


def _is_of_code(key: str, kind: type) -> bool:
    """Return whether an attribute is nothing that torch or ndtp keeps of a tensor."""
    return not key.startswith("ndtp_") and key not in OWN_ATTRIBUTES and not hasattr(kind, key)


def note_read(running: Sequence[CodeReads | None], parameter: Tensor, name: str) -> tuple[CodeReads, Tensor | None]:
    """Note that code reads a parameter, behind what code of this forward or of one around it has done to it.

    Returns:
        The reads of the innermost forward, and what stands for the parameter already: whoever holds that, holds what is
        read, as of a parameter.
    """
    innermost, known = running[-1], None
    assert innermost is not None
    for each in running:
        if each is None:
            continue
        each.take_back(parameter)
        if each.read is not None:
            each.take_attributes_back(parameter)
        stand_in = each.stand_in_of(parameter)
        if stand_in is not None and stand_in.has_grad == torch.is_grad_enabled():
            known = stand_in.plain if stand_in.of_parameter == version_of(parameter) else None
    innermost.note(parameter, name)
    return innermost, known


def _refuse_changed(read: Sequence[Any], _: Any) -> None:
    for each in read:
        refuse_changed(*each)
