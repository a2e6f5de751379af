"""Parts of attention on ranks that are processes: SGLang's own exchanges leave each rank its heads of the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chosen_slots import TOPK, inputs

from nsa_backend.attention.torch_reference import TorchSparseAttention

RANK = Path(__file__).with_name("exchange_of_rank.py")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_is_left_its_heads(tmp_path, ranks):
    """Rows on every rank, on one and on none; SGLang's `fi_a2a` differs from `a2a` in who carries the parts, on Blackwell."""
    given = inputs(8, [TOPK, 1, 0, 5])
    given.q_nope, given.q_rope, given.kv_cache = given.q_nope.float(), given.q_rope.float(), given.kv_cache.float()
    names = ("q_nope", "q_rope", "kv_cache", "topk_slots", "nsa_cache_seqlens", "sm_scale")
    torch.save({name: getattr(given, name) for name in names}, tmp_path / "case.pt")
    processes = [
        subprocess.Popen([sys.executable, RANK, str(rank), str(ranks), tmp_path], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    left = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    whole = TorchSparseAttention().forward(given)
    for name in ("ag_rs", "a2a"):
        torch.testing.assert_close(torch.cat([parts[name] for parts in left], 1), whole, atol=1e-5, rtol=1e-5)
