"""SGLang on a machine without a GPU."""

from __future__ import annotations

import logging
import os
import sys
import types

import torch


def start_process() -> None:
    """Load SGLang and the plugin; call before anything imports triton or sgl_kernel.

    Triton kernels run through Triton's interpreter. sgl_kernel's CUDA libraries are not loaded (they need libcuda), so that
    the module with SGLang's draft loop can be imported; nothing here calls them.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang decorates helpers with torch.compile, which would need a C++ compiler
    if not torch.cuda.is_available():
        loader = types.ModuleType("sgl_kernel.load_utils")
        loader._load_architecture_specific_ops = loader._preload_cuda_library = lambda: None
        sys.modules.setdefault("sgl_kernel.load_utils", loader)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401  (SGLang's draft loop)

    from nsa_backend.testing.interpreter import drop_overflow_checks
    from nsa_backend.testing.process import start_sglang

    drop_overflow_checks()
    start_sglang()
