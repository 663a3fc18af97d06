"""`made_class`: the classes of a split model's modules derive from a user's and from ndtp's, and are in no module."""

from __future__ import annotations

import copyreg
import types
from functools import cache
from typing import Any

from ndtp.errors import LayoutError


class MadeClass(type):
    """The class of such classes, by which a pickle refuses them."""


def made_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """A class that is made for the modules of a split model, whatever class those of the user's have."""
    return _kind(types.prepare_class(name, bases)[0])(name, bases, namespace)


@cache
def _kind(theirs: type) -> type:
    if issubclass(theirs, MadeClass):
        return theirs
    made = MadeClass if theirs is type else type("MadeClass", (MadeClass, theirs), {})
    copyreg.pickle(made, _refuse_pickle)
    return made


def _refuse_pickle(kind: Any) -> Any:
    raise LayoutError(
        f"pickle of a model that is split over ranks ({kind.__name__}): it has process groups and this rank's shards, "
        "which no other process can use\n  fix: ndtp.checkpoint.save(model, optimizer, folder), save_pretrained or "
        "torch.save(model.state_dict()); copy.deepcopy copies it"
    )
