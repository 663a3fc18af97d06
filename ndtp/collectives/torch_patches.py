"""The changes that ndtp makes in torch itself, for the whole process, with the reason and the end of each.

The list has what ndtp replaces in torch, what it adds to torch's own settings and registers, and the loggers of torch
that it filters.  The code of a patch stays with its topic and gets in here by `replaced` or `in_place`, which take what
is listed alone.  Classes of a user's model that get a class of ndtp's are no patches of torch, and are not listed; nor
is what torch sets for a thread or a block of code, such as the mode of gradients.
"""

from __future__ import annotations

import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """The reason for which something of torch is changed, and the torch that will not need it.

    Attributes:
        why: what goes wrong with torch as it is.
        until: what torch must do so that the patch can go.
    """

    why: str
    until: str


PATCHES: dict[str, Patch] = {
    "torch.distributed.distributed_c10d._get_default_group": Patch(
        "a model's own collectives that name no group would take ranks which have the same rows for ranks of their own",
        "torch has a default group that a program can set for a block of code",
    ),
    "torch.distributed.distributed_c10d._canonicalize_group_rank": Patch(
        "the source or target rank of such a collective is a place among the ranks that have other rows",
        "as for _get_default_group",
    ),
    "torch.distributed.distributed_c10d._check_tensor_list": Patch(
        "a list of a split tensor and a plain one would be sent as shards without a word",
        "torch asks __torch_function__ for the tensors in lists that collectives take",
    ),
    "torch.distributed.distributed_c10d._check_single_tensor": Patch(
        "a loss outside of the model that gathers over ranks with the same rows takes each row twice, without a word",
        "torch asks __torch_function__ for collectives, and for those that an autograd.Function calls",
    ),
    "torch.distributed.distributed_c10d._world.pg_names": Patch(
        "torch names groups by their number, so that ranks in different numbers of groups wait for each other for ever",
        "new_group(use_local_synchronization=True) takes a name",
    ),
    "torch.distributed.distributed_c10d._world": Patch(
        "torch 2.15 names a group that ranks make alone by the number of groups that each has made, which differs",
        "as for _world.pg_names",
    ),
    "torch.distributed.nn.functional": Patch(
        "its functions have the world as a default argument and keep gloo's threads alive after the world has ended",
        "torch looks the default group up when such a function is called",
    ),
    "torch.distributed.device_mesh.DeviceMesh._concatenate": Patch(
        "fully_shard over a further dim fails deep inside of torch, and its error does not name the grid",
        "FSDP2 takes parameters whose mesh has any number of dims in any order",
    ),
    "torch.distributed.Backend.backend_capability": Patch(
        "torch's fake process groups serve the devices that it lists, and the emulated one of `ndtp.testing` is none",
        "fake process groups take tensors of any device",
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": Patch(
        "foreach and fused optimizers change a DTensor without counting it in _version, so that a cached weight is old",
        "torch counts changes of DTensors by operations on lists",
    ),
    "torch._library.simple_registry.GenericTorchDispatchRuleHolder.find": Patch(
        "torch 2.11 runs operations on whatever says that it is a DTensor by itself, and asks no class of such tensors",
        "the oldest torch that ndtp takes asks the class of such a tensor, as torch 2.13 does",
    ),
    "torch.distributed.tensor._redistribute": Patch(
        "its logger advises to flatten dims of a grid's mesh, which nobody but ndtp could do",
        "the advice can be turned off for a mesh",
    ),
    "torch.autograd.Function.apply": Patch(
        "a function of a user's own would get a split tensor in a form that it does not know",
        "torch asks __torch_function__ for the arguments of an autograd.Function",
    ),
    "torch._functorch.vmap._add_batch_dim": Patch(
        "vmap would take the shard of a split tensor for the whole, without a word",
        "torch asks __torch_function__ for the tensors that a transform takes",
    ),
    "torch._functorch.eager_transforms._wrap_for_grad": Patch(
        "torch.func.grad, vjp and jacrev would take the shard of a split tensor for the whole, without a word",
        "as for _add_batch_dim",
    ),
    "torch._functorch.eager_transforms._autograd_grad": Patch(
        "what torch.func.vjp gives would take the shard of a gradient for the whole",
        "as for _add_batch_dim",
    ),
    "torch.autograd._make_grads": Patch(
        "a gradient of a whole tensor that code gives to backward would be the shard of a split one",
        "torch asks __torch_function__ for the gradients that backward and grad are given",
    ),
    "torch.Tensor.data": Patch(
        "`plain.data = split` would give a plain tensor the memory of a split one, which ends the process or is a part",
        "torch asks __torch_function__ for the value that is set, too",
    ),
    "torch.jit.ScriptFunction.__call__": Patch(
        "a script of TorchScript would take the shard of a split tensor for the whole, without a word",
        "torch asks __torch_function__ for the tensors that a script takes, or TorchScript is gone",
    ),
    "torch.ScriptMethod.__call__": Patch(
        "as for ScriptFunction",
        "as for ScriptFunction",
    ),
    "torch.utils.checkpoint._CheckpointFrame.__init__": Patch(
        "what a checkpoint runs again in backward would find another default group, and methods that compute at once",
        "a checkpoint takes contexts of its caller for what it runs again, as it does for autocast",
    ),
    "torch.utils.checkpoint._CheckpointFrame.save_inputs": Patch(
        "a checkpoint saves the memory of a tensor that is still to be computed, which will be that of another object",
        "torch asks __torch_function__ for the tensors that a checkpoint saves",
    ),
    "torch.utils.checkpoint._CheckpointFrame.get_inputs": Patch(
        "a checkpoint inside of another one would get the shard of a split tensor, which hooks keep without its class",
        "hooks of saved tensors get tensors of the class that was saved",
    ),
    "torch.distributed.checkpoint.state_dict._distribute_state_dict": Patch(
        "whole states are cut by the sizes without padding, so that they lie otherwise than a padded parameter",
        "torch asks a tensor's class where its parts lie, as it does for distributed checkpoints",
    ),
    "torch.distributed._state_dict_utils._distribute_tensors": Patch(
        "a state that one rank broadcasts is cut without padding, and copied to a shard that has some",
        "as for _distribute_state_dict",
    ),
    "torch._dynamo.config.nontraceable_tensor_subclasses": Patch(
        "a compiler would take the sizes of a split activation, those of the whole, for those of its memory",
        "a class of tensors can say of itself that no graph takes it",
    ),
    "torch.optim.optimizer._foreach_supported_types": Patch(
        "optimizers would take the parameters of a grid one by one, where torch takes DTensors in lists",
        "torch asks isinstance whether a tensor is a DTensor",
    ),
    "torch.utils._foreach_utils._foreach_supported_types": Patch(
        "as for the list of optimizers: clip_grad_norm_",
        "as for the list of optimizers",
    ),
    "torch.utils.swap_tensors": Patch(
        "model.to swaps the memory of a parameter, and hooks stay with the memory that has gone",
        "torch moves the hooks of swapped tensors",
    ),
    "torch.utils.hooks.BackwardHook.setup_input_hook": Patch(
        "hooks of a module's backward would get shards of gradients for gradients of the whole",
        "torch asks __torch_function__ when it calls the hooks of a module",
    ),
    "torch.utils.hooks.BackwardHook.setup_output_hook": Patch(
        "hooks of a module's backward would get shards of gradients for gradients of the whole",
        "torch asks __torch_function__ when it calls the hooks of a module",
    ),
    "torch.nn.Module._maybe_warn_non_full_backward_hook": Patch(
        "register_backward_hook sees the last operation inside of a module, which on a grid is another one",
        "torch removes register_backward_hook",
    ),
}
_REPLACED: set[str] = set()
_LOCK = threading.RLock()


def in_place(target: str) -> Any:
    """The object of torch that is listed under this path, for a patch that changes it in place.

    Raises:
        AttributeError: this torch has no such object.
    """
    assert target in PATCHES, f"{target} is not listed"
    owner, _, name = target.rpartition(".")
    return getattr(pkgutil.resolve_name(owner), name)


def replaced(target: str, make: Callable[[Any], object]) -> None:
    """Put another function in the place of one of torch's, once a process, whichever thread comes first.

    Modules of libraries that have torch's function under its own name call the other one from then on, too.

    Args:
        target: the path, as listed.
        make: takes torch's function, and returns what is to be called in its place.
    """
    with _LOCK:
        if target not in _REPLACED:
            given = in_place(target)
            owner, _, name = target.rpartition(".")
            made = make(given)
            setattr(pkgutil.resolve_name(owner), name, made)
            _REPLACED.add(target)
            for module in _importers(name, given):
                with suppress(AttributeError, TypeError):  # one that cannot be written to
                    setattr(module, name, made)


def _importers(name: str, given: object) -> Iterator[object]:
    """Yield the modules outside of torch that have something of torch's under its own name."""
    for module in [*sys.modules.values()]:
        own = {}
        with suppress(Exception):  # what stands for a module may import when it is asked
            own = vars(module)
        if own.get(name) is given and str(own.get("__name__")).partition(".")[0] != "torch":
            yield module
