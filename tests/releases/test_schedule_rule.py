"""DeepGEMM's paged-MQA schedule: what the installed header says against what the metadata launch writes.

The rule lives in a header of the installed package and has changed between its releases; the GPU test compares with what
DeepGEMM itself computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from batches import forward_batch
from metadata_reference import Batch

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.kernels.plan import SCHEDULE_SPLIT_KV
from nsa_backend.registration import create_backend

NUM_SMS, HOPPER = 132, 90


def header() -> str:
    """The scheduler of Hopper's kernel; newer packages have one header an architecture."""
    folder = Path(find_spec("deep_gemm").submodule_search_locations[0]) / "include/deep_gemm/scheduler"
    (found,) = list(folder.glob("sm90_paged_mqa_logits.cuh")) or list(folder.glob("paged_mqa_logits.cuh"))
    return found.read_text()


FIRST_SEGMENTS: dict[str, Callable[[int, int, int], int]] = {
    "uint32_t seg_starts = sm_idx * q + min(sm_idx, r);": lambda sm, q, r: sm * q + min(sm, r),
    "uint32_t seg_starts = sm_idx * q + (sm_idx > pivot ? sm_idx - pivot : 0);": (
        lambda sm, q, r: sm * q + max(0, sm - (NUM_SMS - r))
    ),
}
"""The segment that an SM starts at, of `q` segments an SM and `r` left over, by the line that says so in the header."""


def test_the_header_still_has_a_rule_that_is_known():
    text = header()
    assert sum(line in text for line in FIRST_SEGMENTS) == 1
    assert "math::ceil_div(context_len, SPLIT_KV)" in text
    assert "prefix_sum[mid] * num_next_n_atoms <= seg_starts" in text


def schedule(lengths: list[int]) -> np.ndarray:
    """What the installed DeepGEMM computes for rows of these lengths, walking over all segments one by one."""
    (first_segment,) = [rule for line, rule in FIRST_SEGMENTS.items() if line in header()]
    segments = [(row, split) for row, length in enumerate(lengths) for split in range(-(-length // SCHEDULE_SPLIT_KV))]
    share, rest = divmod(len(segments), NUM_SMS)
    ends = (len(lengths), 0)
    starts = [*(first_segment(sm, share, rest) for sm in range(NUM_SMS)), len(segments)]
    return np.array([segments[start] if start < len(segments) else ends for start in starts], dtype=np.int32)


@pytest.mark.parametrize(
    ("requests", "longest"), [(1, 10), (1, 16_000), (7, 2_000), (40, 1_000), (132, 256), (133, 300), (64, 16_000)]
)
def test_the_launch_writes_the_installed_schedule(make_runner, requests, longest):
    runner = make_runner(table_width=16_384)
    backend = create_backend(runner)
    backend.writer.config = replace(backend.writer.config, num_sms=NUM_SMS, surplus_last=adapter.schedule_surplus_last(HOPPER))
    lengths = np.random.default_rng(requests).integers(1, longest + 1, requests)
    table = backend.writer.req_to_token.numpy()
    batch = Batch("decode", lengths.tolist(), list(range(1, requests + 1)), table, 64, 0)
    backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    ours = backend.forward_metadata.paged_mqa_schedule_metadata.numpy()
    np.testing.assert_array_equal(ours, schedule(lengths.tolist()))
