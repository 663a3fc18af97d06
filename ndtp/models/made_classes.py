"""`made_class`: the classes of a split model's modules derive from a user's and from ndtp's, and are in no module."""

from __future__ import annotations

import copyreg
import types
from abc import ABCMeta
from functools import cache
from typing import Any

from ndtp.errors import LayoutError


class MadeClass(type):
    """The class of such classes, by which a pickle refuses them."""

    def mro(cls) -> list[type]:
        """Return the classes in the order in which attributes are looked up: that of the bases as they were given."""
        bases = cls.__dict__.get("ndtp_bases", cls.__bases__)
        if cls.__bases__ == bases:
            kinds = super().mro()[1:]
        else:
            first, last = bases
            kinds = [*(kind for kind in first.__mro__ if kind not in last.__mro__), *last.__mro__]
        kinds = [kind for kind in kinds if kind is not _NotTold]  # of a class that was made before
        return [cls, *[_NotTold] * any(map(_is_told, kinds)), *kinds]


class _NotTold:
    """The class that stands between a made class and those that would be told of it as of a subclass."""

    def __init_subclass__(cls, **_: object) -> None:
        """Tell nobody: a registry would have the class twice, and arguments are those of its own subclasses."""


def made_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """A class that is made for the modules of a split model, whatever class those of the user's have.

    Neither their metaclass nor their bases are told of it.

    Args:
        bases: what attributes are looked up in, one after the other.
    """
    kind = _kind(types.prepare_class(name, bases)[0])
    layout = bases[::-1] if _is_laid_out_otherwise(bases[-1]) else bases
    return ABCMeta.__new__(kind, name, layout, namespace | {"ndtp_bases": bases})


def _is_told(kind: type) -> bool:
    """Return whether a class of somebody else's is told of its subclasses."""
    return "__init_subclass__" in vars(kind) and kind is not object and not kind.__module__.startswith("ndtp.")


def _is_laid_out_otherwise(theirs: type) -> bool:
    """Return whether Python takes no class for one of theirs whose first base is another one.

    An object's class may change where both add their attributes to one class, and the first base says to which.  A
    class that begins with `ABC` or `Generic` adds them to that one; any other, as ndtp's own, to `object`.
    """
    base = theirs.__base__
    while base is not None and _memory(base) == _memory(theirs):
        theirs, base = base, base.__base__
    return base is not object


def _memory(kind: type) -> tuple[int, int, int]:
    return kind.__basicsize__, kind.__dictoffset__, kind.__weakrefoffset__


@cache
def _kind(theirs: type) -> type:
    """The class of a class that is made of one of theirs.

    It derives from `ABCMeta`, so that code may derive a class from a made one and from one of `abc`, as `higher` does.
    """
    if issubclass(theirs, MadeClass):
        return theirs
    bases = (theirs,) if issubclass(theirs, ABCMeta) else (ABCMeta,) if theirs is type else (theirs, ABCMeta)
    made = type("MadeClass", (MadeClass, *bases), {})
    copyreg.pickle(made, _refuse_pickle)
    return made


def _refuse_pickle(kind: Any) -> Any:
    raise LayoutError(
        f"pickle of a model that is split over ranks ({kind.__name__}): it has process groups and this rank's shards, "
        "which no other process can use\n  fix: ndtp.checkpoint.save(model, optimizer, folder), save_pretrained or "
        "torch.save(model.state_dict()); copy.deepcopy copies it"
    )
