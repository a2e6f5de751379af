"""What Triton would compile for the launches of a server, first at its start and then while it serves; prints JSON.

    python tests/kernels/launch_variants.py

A process of its own, in which no kernel runs: each launch is only asked for the key by which Triton would look for what it has
compiled. Elsewhere in these tests kernels are the interpreter's, which has none.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.join_query import join_query
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.local_slots import local_slots
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.partial_lse import partial_lse
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.kernels.prefill import write_prefill
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.kernels.round_tensors import RoundInputs, SamplingParameters, fill_round_inputs, store_round_results
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.kernels.sparse_decode_plan import Split, Tile
from nsa_backend.kernels.topk_slots import topk_slots

D, STEPS, SMS, TOPK = 4, 4, 132, 2048
POOL = torch.zeros(64, 5000, dtype=torch.int32)
CACHES = (torch.zeros(64, 1, 576, dtype=torch.bfloat16), torch.zeros(64, 1, 656, dtype=torch.uint8).view(torch.float8_e4m3fn))
RANKS = 2
"""That divide the KV of a request, in the calls that say so."""
HEADS = 16
MOST_REQUESTS = 128
"""Of a captured batch."""
CAPTURED_ROWS = (*range(1, 65), MOST_REQUESTS, MOST_REQUESTS * D)
"""That sparse_decode attends for."""


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


def decode(rows: int, offset: int) -> None:
    """Attention of one layer; the lengths of draft step i begin i * rows behind those of the first."""
    slots, lens = torch.zeros(rows, TOPK, dtype=torch.int32), behind(offset, rows, torch.int32)
    for cache in CACHES:
        parts = Parts.allocate(rows, HEADS, 512, TOPK, SMS, "cpu", fp8=cache is CACHES[1])
        sparse_decode(*query(rows, HEADS), cache, slots, lens, 0.1, num_sms=SMS, parts=parts)


def divided(rows: int, offset: int) -> None:
    """Attention of one layer on a rank that has a part of the KV: by sparse_decode, and around FA3 and FlashMLA."""
    slots, lens = torch.zeros(rows, TOPK, dtype=torch.int32), behind(offset, rows, torch.int32)
    for cache in CACHES:
        parts = Parts.allocate(rows, HEADS, 512, TOPK, SMS, "cpu", fp8=cache is CACHES[1])
        lse = torch.zeros(rows, HEADS)
        sparse_decode(*query(rows, HEADS), cache, slots, lens, 0.1, num_sms=SMS, parts=parts, ranks=RANKS, rank=1, lse=lse)
    local_slots(slots, RANKS, 1)
    counts, padded = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, 64, 512, dtype=torch.bfloat16)
    partial_lse(padded[:, :HEADS].contiguous(), torch.zeros(HEADS, rows).T, counts, natural=True)
    for natural in (False, True):
        partial_lse(padded[:, :HEADS], torch.zeros(rows, 64)[:, :HEADS], counts, natural=natural)


def inputs_of_projections(rows: int) -> None:
    """In every form of scales."""
    if rows:
        for form in Scales:
            quantise(torch.ones(rows, 1024, dtype=torch.bfloat16), form, before_ours=True)


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
    store_round_results(*results, torch.zeros(4, MOST_REQUESTS * (D + 1), dtype=torch.int32), behind(0, 1))


def start() -> None:
    """Captures of every size, and a first prompt."""
    for size in (1, 2, 4, 8, 16, 32, 64, MOST_REQUESTS):
        metadata(size, 0, 5000)
        round_of(size, size, 0)
        inputs_of_projections(size)
    for rows in CAPTURED_ROWS:
        decode(rows, 0)
        divided(rows, 0)
    prefill(1, 0, 8, 0, 0)


def serve() -> None:
    """Batches of any size, in halves that begin anywhere, eager ones too."""
    for requests, offset in ((0, 0), (1, 1), (3, 2), (5, 3), (16, 1), (17, 0), (130, 1), (600, 2)):
        metadata(requests, offset, 17 + 100 * requests)
        prefill(max(requests, 1), offset, max(requests, 1), 16 * offset, offset)
        round_of(min(requests, 64), 64, offset)
        inputs_of_projections(requests)
    for rows in (1, 2, 3, 5, 16, 17, 63, 64, 141):
        for step in range(STEPS - 1):
            decode(rows, step * rows)
        divided(rows, rows % 4)


def forms_of_decode() -> int:
    """Tiles of captured rows, split and not, over both caches: what the plan asks to compile of sparse_decode's kernel."""
    forms = set()
    for fp8, rows in itertools.product((False, True), CAPTURED_ROWS):
        tile = Tile.of(rows, HEADS, fp8=fp8)
        forms.add((fp8, replace(tile, programs=1), Split.of(rows, HEADS, TOPK, SMS, tile).parts > 1))
    return len(forms)


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
    sys.stdout.write(json.dumps({"keys": keys, "forms_of_decode": forms_of_decode()}))


if __name__ == "__main__":
    main()
