"""Whether a tensor was changed in place."""

from __future__ import annotations

from torch import Tensor


def version_of(x: Tensor) -> tuple[int, ...]:
    """Changes when the tensor is changed in place; writes to its `.data` are seen by nobody.

    An operation on a DTensor counts on the DTensor alone, one on its local tensor there alone.
    """
    local = getattr(x, "_local_tensor", x)
    if local.is_inference() or x.is_inference():  # torch counts no changes of these
        return (local.data_ptr(),)
    return x._version, local._version, local.data_ptr()
