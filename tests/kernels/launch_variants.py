"""What Triton would compile for the launches of a server, first at its start and then while it serves; prints JSON.

    python tests/kernels/launch_variants.py

A process of its own, in which no kernel runs: each launch is only asked for the key by which Triton would look for what it has
compiled. Elsewhere in these tests kernels are the interpreter's, which has none.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.join_query import join_query
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.kernels.prefill import write_prefill
from nsa_backend.kernels.round_tensors import RoundInputs, SamplingParameters, fill_round_inputs, store_round_results
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.kernels.sparse_decode_plan import Tile
from nsa_backend.kernels.topk_slots import topk_slots

D, STEPS, SMS, TOPK = 4, 4, 132, 2048
POOL = torch.zeros(64, 5000, dtype=torch.int32)
CACHE = torch.zeros(64, 1, 576, dtype=torch.bfloat16)


class Hopper:
    """A driver of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def behind(offset: int, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Ones that begin `offset` values behind an aligned address, as slices of SGLang's tensors do."""
    return torch.ones(offset + count, dtype=dtype)[offset:]


def metadata(requests: int, offset: int, table_width: int) -> None:
    """Every paged mode, whose plans of top-k end at 512 rows."""
    inputs = BatchInputs(behind(offset, requests), behind(offset, requests))
    modes: list[MetadataPlan] = [
        plans.plan_decode(requests),
        plans.plan_draft_decode(requests, STEPS),
        plans.plan_target_verify(requests, D),
        plans.plan_draft_extend_v2(requests, D),
    ]
    for plan in modes:
        buffers = MetadataBuffers.allocate(plan, table_width=table_width, num_sms=SMS, device="cpu", wide=False, planned=True)
        write_metadata(plan, buffers, inputs, req_to_token=POOL, index_topk=TOPK)


def prefill(requests: int, offset: int, longest: int, flattened: int, chunk: int) -> None:
    """The metadata, and what a layer launches for a chunk of rows that begins at `chunk`."""
    inputs = BatchInputs(behind(offset, requests), behind(offset, requests), behind(offset, requests, torch.int32))
    fields = write_prefill(
        inputs, req_to_token=POOL, index_topk=TOPK, num_rows=37 + chunk, longest=longest, flattened=flattened
    )
    rows = fields.token_to_batch_idx[chunk:]
    topk_slots(torch.zeros(len(rows), TOPK, dtype=torch.int32), fields.real_page_table, rows, plans.PAGE_SIZE)
    join_query(*query(len(rows), 16), torch.zeros(len(rows), 64, 576, dtype=torch.bfloat16))


def query(rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As SGLang hands it over: heads first, and the tail of a wider query."""
    nope = torch.zeros(heads, rows, 512, dtype=torch.bfloat16).transpose(0, 1)
    return nope, torch.zeros(rows, heads, 192, dtype=torch.bfloat16)[..., 128:]


def decode(rows: int, offset: int, heads: int = 16) -> None:
    """Attention of one layer; the lengths of draft step i begin i * rows behind those of the first."""
    parts = Parts.allocate(rows, heads, 512, TOPK, SMS, "cpu")
    slots, lens = torch.zeros(rows, TOPK, dtype=torch.int32), behind(offset, rows, torch.int32)
    sparse_decode(*query(rows, heads), CACHE, slots, lens, 0.1, num_sms=SMS, parts=parts)


def round_of(requests: int, size: int, offset: int) -> None:
    """What is launched before and in a graph of `size` requests."""
    sampling = SamplingParameters(
        behind(offset, requests, torch.float32)[:, None],
        behind(offset, requests, torch.float32),
        behind(offset, requests, torch.int32),
    )
    for parameters in (None, sampling):
        batch = RoundInputs(behind(offset, requests), behind(offset, requests), parameters)
        fill_round_inputs(batch, RoundInputs.allocate(size, "cpu", sampled=parameters is not None))
    results = behind(offset, size * D, torch.int32), behind(offset, size, torch.int32)
    store_round_results(*results, torch.zeros(4, 70 * (D + 1), dtype=torch.int32), behind(0, 1))


def start() -> None:
    """Captures of every size, and a first prompt."""
    for size in (1, 2, 4, 8, 16, 32, 64):
        metadata(size, 0, 5000)
        round_of(size, size, 0)
    for rows in range(1, 65):
        decode(rows, 0)
    prefill(1, 0, 8, 0, 0)


def serve() -> None:
    """Batches of any size, in halves that begin anywhere, eager ones too."""
    for requests, offset in ((0, 0), (1, 1), (3, 2), (5, 3), (16, 1), (17, 0), (130, 1), (600, 2)):
        metadata(requests, offset, 17 + 100 * requests)
        prefill(max(requests, 1), offset, max(requests, 1), 16 * offset, offset)
        round_of(min(requests, 64), 64, offset)
    for rows in (1, 2, 3, 5, 16, 17, 63, 64):
        for step in range(STEPS - 1):
            decode(rows, step * rows)


def main() -> None:
    keys: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"start": [], "serve": []})
    now = "start"

    def look(*, key: Any, fn: Any, **_: Any) -> bool:
        known = keys[fn.name]
        if str(key) not in known["start"] + known["serve"]:
            known[now].append(str(key))
        return True  # nothing is compiled or launched

    driver.set_active(Hopper())
    knobs.runtime.jit_cache_hook = look
    start()
    now = "serve"
    serve()
    tiles = len({Tile.of(rows, 16) for rows in range(1, 65)})
    sys.stdout.write(json.dumps({"keys": keys, "tiles": tiles}))


if __name__ == "__main__":
    main()
