"""torch's state of one thread, carried to another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from ndtp.collectives.streams import has_streams


def state_of_thread(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Gradient and inference mode, autocast, modes (meters, a default device), saved tensors' hooks, device and stream.

    Args:
        device_type: whose autocast counts beside that of "cpu".

    Returns:
        The context in which another thread is as this one is now.
    """
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled())
        for device in dict.fromkeys(("cpu", device_type))
        if torch.is_autocast_enabled(device)
    ]
    functions, dispatches = function_modes(), dispatch_modes()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    stream = torch.cuda.current_stream() if has_streams(device_type) else None

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                if stream.device.type == "cuda":
                    torch.cuda.set_device(stream.device)
                stack.enter_context(torch.cuda.stream(stream))
            if is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for device, dtype, is_on, is_cached in casts:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on, cache_enabled=is_cached))
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            for mode in functions:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for mode in dispatches:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            yield

    return entered
