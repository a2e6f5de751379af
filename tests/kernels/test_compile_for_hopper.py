"""Kernels compile for Hopper: those of attention, of layers and of few experts fit it; the metadata launch waits nowhere."""

from __future__ import annotations

import pytest
from in_a_process import printed_by

pytestmark = pytest.mark.slow

SHARED_BYTES = 228 * 1024
"""Of an SM of Hopper for programs (CUDA C++ Programming Guide, compute capability 9.0)."""
OF_EVERY_PROGRAM = 1024
"""Bytes of it that CUDA takes, from the same chapter."""
REGISTERS = 1 << 16
"""Of an SM, from the same chapter."""
PROGRAMS = 32
"""Of an SM at most, from the same chapter."""
SPILLED_BYTES = 160
"""Of a thread at most, and those tiles were the fastest of their shapes on an H200 in spite of it."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    return printed_by("compile_for_hopper.py", tmp_path_factory.mktemp("triton"))


def test_every_variant_fits(compiled):
    """As many programs an SM as its tile says; with what they keep in registers, but for wide tiles and for FP8."""
    assert len(compiled) >= 15
    for name, found in compiled.items():
        assert found["programs"] * (found["shared"] + OF_EVERY_PROGRAM) <= SHARED_BYTES, name
        assert found["programs"] * found["registers"] * found.get("threads", 0) <= REGISTERS, name
        lean = "join" in name or "front" in name or "experts" in name or ("heads=16" in name and "bf16" in name)
        assert found["spilled"] <= (0 if lean else SPILLED_BYTES), name


def test_nothing_is_read_or_written_before_the_wait(compiled):
    """The KV cache would come by asynchronous copies; slots, lengths and the query by plain loads.

    Experts' weights, choices and order may be read: the launch ahead lets this one begin once it has waited for who wrote them.
    """
    for name, found in compiled.items():
        assert found["waits"], name
        assert found["ahead"] == (["ld.global"] if "read ahead" in name else []), name


def test_only_our_own_next_launch_may_begin_before_its_predecessor_ends(compiled):
    """What follows any other launch is a kernel of others, which may read before it waits what an earlier one still writes."""
    kinds = {name.split(",")[0]: found["lets_begin"] for name, found in compiled.items() if "before one of ours" in name}
    assert kinds.pop("attend")
    assert kinds.pop("front")
    of = "8 choices", "9 choices", "8 choices and a shared one"
    assert kinds == dict.fromkeys([f"experts of {choices}" for choices in of], True)
    for name, found in compiled.items():
        assert found["lets_begin"] == ("before one of ours" in name), name


def test_every_form_of_the_metadata_launch_compiles_and_as_many_programs_fit_as_a_multiprocessor_takes(tmp_path):
    """Every form that a release asks for, with a schedule and without."""
    forms = printed_by("compile_metadata.py", tmp_path)
    assert len(forms) == 14
    assert all(PROGRAMS * (found["shared"] + OF_EVERY_PROGRAM) <= SHARED_BYTES for found in forms.values())
