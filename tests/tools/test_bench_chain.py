"""The sections `chain` and `parts` of `bench attention`: which ways to run a layer's kernels are compared, in which order."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from nsa_backend.benchmarks.calls import chain, chain_ways
from nsa_backend.benchmarks.commands import attention


class FakeChain:
    """Notes what is called; a result is what was called for it."""

    def __init__(self, kv: str):
        self.case, self.selected, self.called = SimpleNamespace(kv=kv), ["selected 0", "selected 1"], []

    def topk(self, i):
        self.called.append(("top-k", i))
        return f"slots {i}"

    def write(self, i):
        self.called.append(("write", i))

    def sparse_decode(self, slots, dependent):
        self.called.append(("sparse_decode", slots, dependent))

    def fa3(self, slots, schedule):
        self.called.append(("fa3", slots, schedule))

    def fa3_schedule(self):
        return "schedule"


@pytest.fixture
def releases_with_topk(monkeypatch):
    made = SimpleNamespace(topk_v2=lambda: (None, None), fa3_scheduler=lambda: print)
    for module in (chain, chain_ways):
        monkeypatch.setattr(module, "adapter", made)
    return made


@pytest.mark.usefixtures("releases_with_topk")
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_every_way_runs_in_sglangs_order(kv):
    """Top-k, KV write, attention on the slots of this very call; a part that is left out is the only one missing."""

    def run(name: str) -> list[tuple]:
        fake.called.clear()
        made[name](1)
        return list(fake.called)

    fake = FakeChain(kv)
    made = chain.chain_calls(fake)
    topk, write = ("top-k", 1), ("write", 1)
    assert run("top-k") == [topk]
    assert run("KV write") == [write]
    assert run("sparse_decode") == [("sparse_decode", "selected 1", True)]
    assert run("chain") == [topk, write, ("sparse_decode", "slots 1", True)]
    assert run("chain, ordinary launches") == [topk, write, ("sparse_decode", "slots 1", False)]
    assert run("chain without the KV write") == [topk, ("sparse_decode", "slots 1", True)]
    assert run("chain without the top-k") == [write, ("sparse_decode", "selected 1", True)]
    assert ("fa3 chain, scheduled once" in made) == (kv == "bf16")
    if kv == "bf16":
        assert run("fa3 chain, scheduled in the call") == [topk, write, ("fa3", "slots 1", None)]
        assert run("fa3 chain, scheduled once") == [topk, write, ("fa3", "slots 1", "schedule")]


def test_cells_follow_the_options(releases_with_topk):
    found = chain.cells(None, None, 3)
    names = [cell.name for cell in found]
    assert len(set(names)) == len(names)
    assert [sum(cell.section == section for cell in found) for section in ("chain", "parts")] == [2 * 2 * 4, 4 + 4 * 2]
    assert "chain, fp8, 16 heads, 8 rows" in names
    assert [cell.name for cell in chain.cells([128], [32], 3) if cell.section == "parts"] == [
        "parts, indexer, 32 rows", "parts, FA3, 128 heads, 32 rows",
    ]  # fmt: skip
    releases_with_topk.topk_v2 = lambda: None
    assert chain.cells(None, None, 3) == []


@pytest.mark.usefixtures("releases_with_topk")
def test_they_are_measured_on_request_alone_and_with_rows_of_ones_own(monkeypatch):
    monkeypatch.setattr(attention, "start_sglang", lambda: None)
    options = argparse.Namespace(batch=[1, 32], heads=[16], quick=True, section=None)
    assert {cell.section for cell in attention.cells(options, None)} == {"decode"}
    options.section = ["parts", "chain"]
    assert {cell.section for cell in attention.cells(options, None)} == {"parts", "chain"}


def test_a_table_adds_the_kernels_up(capsys):
    us = {"top-k": 3.0, "KV write": 1.5, "sparse_decode": 8.0, "chain": 11.0}
    row = {"kv": "bf16", "heads": 16, "rows": 1, "us": us, "min_max": {name: [1.0, 20.0] for name in us}}
    chain.show([row, {"part": "FA3", "heads": 128, "rows": 32, "us": {"fa3": 50.0}, "min_max": {"fa3": [49.0, 51.5]}}])
    printed = " ".join(capsys.readouterr().out.split())
    assert "bf16, 16 heads, 1 rows | the kernels of the chain alone, added up | 12.5" in printed
    assert "FA3, 128 heads, 32 rows | fa3 | 50.0 | 49.00 to 51.50" in printed
