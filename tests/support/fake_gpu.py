"""A GPU that is not there: tensors of it have shapes and no values, and its kernels do nothing.

Whatever waits for such a GPU to read a value raises; what is copied between it and the host is listed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from sglang.kernels.ops.attention import position
from sglang.kernels.ops.speculative import cache_locs, eagle, gather_spec_extras
from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2, spec_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

KERNELS = (position, cache_locs, eagle, gather_spec_extras)
"""Modules whose Triton kernels SGLang launches between the graphs of a round."""
BRANCHES = (cache_locs, eagle_utils, eagle_worker_v2, spec_utils)
"""Modules that ask once whether there is a CUDA GPU."""


class Crossings(TorchDispatchMode):
    """Lists the operations that have tensors on the host and on the GPU; a number on the host is no tensor here."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.sum.default and args[0].device.type == "cpu" and not args[0].numel():
            return torch.tensor(0)  # the sum of nothing is known, though tensors have no values
        returned = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, returned)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors if tensor.dim() or "copy" in str(func)}) > 1:
            self.found.append(str(func))
        return returned


@contextlib.contextmanager
def fake_gpu() -> Iterator[Crossings]:
    """SGLang takes its branches for CUDA; tensors have no memory, streams and events do nothing, kernels do not run."""
    sgl_kernel = ModuleType("sgl_kernel")
    sgl_kernel.verify_tree_greedy = mock.Mock()
    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch.dict(sys.modules, {"sgl_kernel": sgl_kernel}))
        for module in BRANCHES:
            put(mock.patch.object(module, "_is_cuda", True))
        for module in KERNELS:
            for name in [name for name, value in vars(module).items() if isinstance(value, InterpretedFunction)]:
                put(mock.patch.object(module, name, mock.MagicMock()))
        if hasattr(eagle_worker_common, "assign_draft_cache_locs_contiguous"):
            put(mock.patch.object(eagle_worker_common, "assign_draft_cache_locs_contiguous", mock.MagicMock()))
        put(mock.patch.object(eagle_utils, "sgl_build_tree_kernel_efficient", mock.Mock(), create=True))
        put(mock.patch.object(torch.cuda, "current_stream", mock.Mock()))
        put(mock.patch.object(torch.cuda, "Event", mock.Mock()))
        put(mock.patch.object(torch.Tensor, "record_stream", mock.Mock()))
        put(FakeTensorMode())
        yield put(Crossings())


def gpu(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Zeros that would be on a GPU."""
    return torch.zeros(*shape, dtype=dtype, device="cuda")
