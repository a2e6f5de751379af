"""SGLang in this process as the scheduler of a server loads it, without a server."""

from __future__ import annotations

import tempfile
from pathlib import Path


def start_sglang() -> None:
    """Load SGLang's plugins, and its parallel state of one rank, which its attention code asks for group sizes."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from sglang.srt.plugins import load_plugins

    from nsa_backend.testing.calls import calls

    load_plugins()
    if model_parallel_is_initialized():
        return
    calls.publish(1, 2)  # newer releases read group sizes from the published options
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}"
    )
    initialize_model_parallel(backend="gloo")
