"""SGLang in this process as the scheduler of a server loads it, without a server; on a machine without a GPU too."""

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

    from nsa_backend.testing.interpreter import drop_unused_work

    drop_unused_work()
    start_sglang()


def start_sglang() -> None:
    """Load SGLang's plugins, and its parallel state of one rank, which its attention code asks for group sizes."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from sglang.srt.plugins import load_plugins

    from nsa_backend.testing.calls import calls

    load_plugins()
    if model_parallel_is_initialized():
        return
    calls.publish(1, 2)  # newer releases read group sizes from the published options
    # A store in memory: SGLang itself would take a port, or a file that stays behind.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0)
    initialize_model_parallel(backend="gloo")
