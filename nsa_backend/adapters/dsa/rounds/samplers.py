"""FlashInfer's sampling kernels, which sampled rounds launch, compiled while the rest of a server starts.

A machine that never had them takes a minute or two, and FlashInfer begins at their first call: the capture of these rounds
would wait for it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.dsa.rounds.served import SAMPLED_SWITCH

logger = logging.getLogger(__name__)


def compile_meanwhile() -> threading.Thread | None:
    """Begin to compile them, where sampled rounds may be one graph and FlashInfer did not come with them; the thread that does.

    It runs compilers alone: what loads kernels, or asks for a GPU, could disturb a capture. A lock of FlashInfer's has other
    ranks, and the first call, wait for it. Where FlashInfer refuses, the log says so and the start goes on: what a capture then
    meets is told there.
    """
    if not release().sampled.served(SAMPLED_SWITCH):
        return None
    try:
        from flashinfer.jit.sampling import gen_sampling_module

        kernels = gen_sampling_module()
    except Exception as error:
        _tell(error)
        return None
    if kernels.is_aot:
        return None
    thread = threading.Thread(target=_compile, args=(kernels,), name="nsa_backend: FlashInfer's sampling", daemon=True)
    thread.start()
    return thread


def _compile(kernels: Any) -> None:
    try:
        kernels.build(verbose=False, need_lock=True)
    except Exception as error:
        _tell(error)


def _tell(error: Exception) -> None:
    logger.warning(
        "nsa_backend: FlashInfer's sampling kernels do not compile, %s: %s; sampled rounds will try again",
        type(error).__name__,
        (str(error).splitlines() or [""])[0],
    )
