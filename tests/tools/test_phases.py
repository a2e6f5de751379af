"""Where the time of a launch goes, from when its blocks came by the marks of its source."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nsa_backend.benchmarks.tuning import phases
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.sparse_verify import PARTED, constants


def test_phases_are_between_marks_by_each_blocks_own_clock():
    """Blocks' multiprocessors count from other numbers, two cycles a nanosecond here."""
    ns = np.array([[0, 1000, 4000], [500, 2500, 4500]])
    stamps = np.stack([2 * ns + [[7], [90_000]], ns + 10**18], axis=-1).astype(np.uint64)
    us, whole = phases.durations(stamps)
    assert us.tolist() == [[1.0, 3.0], [2.0, 2.0]]
    assert whole == 4.5


def test_a_phase_that_a_block_did_not_have_took_it_no_time():
    """Nor do blocks count that had nothing to do."""
    ns = np.array([[0, 1000, 0, 4000], [10, 0, 0, 0]])
    us, whole = phases.durations(np.stack([2 * ns, ns], axis=-1).astype(np.uint64))
    assert us.tolist() == [[1.0, 0.0, 3.0]]
    assert whole == 4.0


def test_every_phase_has_its_mark():
    assert set(map(int, re.findall(r"stamp<(\d+)>\(\)", PARTED.read_text()))) == set(range(phases.MARKS))


@pytest.mark.slow
def test_a_source_with_marks_compiles_for_hopper_with_all_in_registers():
    _, said = compiled(PARTED, constants(4, 16, 2048) | {"STAMPS": phases.MARKS})
    assert "0 bytes spill stores, 0 bytes spill loads" in said
