"""SGLang's server with this package's backend, its draft steps spoiled for a comparison: all of them attend to L + 1 tokens.

    python -m nsa_backend.benchmarks.trained.shared_length --model-path CHECKPOINT ...

So the first draft step sees itself, and later ones see the first draft but neither themselves nor those between. Only this
module does it, in its own process and in the ones that it spawns, which import it as their main module.
"""

from __future__ import annotations

import logging
import runpy

from nsa_backend import registration
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.metadata.views import NSAMetadata
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

ANNOUNCEMENT = "a benchmark's server: every draft step attends to L + 1 tokens"


class OneLengthMultiStepBackend(NativeSparseAttnMultiStepBackend):
    """Every draft step has the length that the first one should have."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        logging.getLogger(__name__).warning(ANNOUNCEMENT)

    def plan(self, num_requests: int) -> MetadataPlan:
        reach = self.speculative_num_steps
        return MetadataPlan(num_requests, num_requests, 1, row_offset=1, cache_offset=1, table_offset=reach)

    def hand_out(self, steps: tuple[NSAMetadata, ...]) -> None:
        super().hand_out(steps * len(self.attn_backends))


if __name__ in ("__main__", "__mp_main__"):
    registration.NativeSparseAttnMultiStepBackend = OneLengthMultiStepBackend

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
