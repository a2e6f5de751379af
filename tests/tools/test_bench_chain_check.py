"""The check of the chain's ways: slots, parts or KV that are read too early are found, and another order of slots passes."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.benchmarks.calls import chain_ways

ROWS, SLOTS, TOPK, DIM = 2, 64, 16, 8
NEW = [5, 40]  # slots of the new tokens
NAMES = (
    "sparse_decode",
    "chain",
    "chain, ordinary launches",
    "chain without the KV write",
    "chain without the top-k",
)


class FakeChain:
    """Kernels on the CPU, which write where they wrote before, as replays do.

    Dependent launches of attention read `early` (slots, cache or parts) as it was before what is ahead of them wrote it.
    """

    def __init__(self, early: str = "", wrong_topk: bool = False):
        self.early, self.wrong_topk = early, wrong_topk
        self.case = SimpleNamespace(kv="fp8")
        generator = torch.Generator().manual_seed(0)
        self.cache = torch.randn(SLOTS, DIM, generator=generator)
        self.old, self.new = self.cache[NEW].clone(), torch.randn(ROWS, DIM, generator=generator)
        chosen = [[n, *(slot for slot in range(SLOTS) if slot not in NEW)][:TOPK] for n in NEW]
        self.chosen = torch.tensor(chosen, dtype=torch.int32)
        self.slots, self.parts = self.chosen.clone(), torch.zeros(ROWS, TOPK, DIM)
        self.outs: dict[bool, torch.Tensor] = {}
        self.calls = 0
        self.stale_slots, self.stale_cache = self.slots.clone(), self.cache.clone()
        self.selected = [self.chosen.clone()]

    def topk(self, i):
        self.calls += 1
        order = torch.randperm(TOPK, generator=torch.Generator().manual_seed(self.calls))
        self.stale_slots = self.slots.clone()
        self.slots.copy_(self.chosen[:, order])
        if self.wrong_topk and self.calls > 2:
            self.slots[0, 0] = self.slots[0, 1]
        return self.slots

    def write(self, i):
        self.stale_cache = self.cache.clone()
        self.cache[NEW] = self.new

    def restore(self):
        self.cache[NEW] = self.old

    def forget(self):
        self.parts.fill_(torch.nan)

    def sparse_decode(self, slots, dependent):
        """Sums in the order of the slots, which is in their last bits."""
        early = self.early if dependent else ""
        cache = self.stale_cache if early == "cache" else self.cache
        slots = self.stale_slots if early == "slots" else slots
        stale_parts = self.parts.clone()
        self.parts.copy_(cache[slots.long()])
        parts = stale_parts if early == "parts" else self.parts
        out = self.outs.setdefault(dependent, torch.empty(ROWS, DIM))
        return out.copy_(functools.reduce(torch.add, parts.unbind(1)))


@pytest.fixture(autouse=True)
def graphs_on_the_cpu(monkeypatch):
    """A graph that calls again what it has captured; both run twice before a replay, as on a GPU."""

    def captured(launch):
        launch()
        launch()
        return SimpleNamespace(replay=launch)

    monkeypatch.setattr(chain_ways, "captured_graph", captured)
    monkeypatch.setattr(chain_ways, "adapter", SimpleNamespace(fa3_scheduler=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_another_order_of_the_slots_is_no_fault():
    """Though it gives other bits than the first selection does."""
    fake = FakeChain()
    found = chain_ways.ways(fake)
    assert tuple(found) == NAMES
    first = found["sparse_decode"](0).clone()
    assert not torch.equal(found["chain without the KV write"](0), first)
    chain_ways.check(found)
    assert torch.equal(fake.cache[NEW], fake.new)


@pytest.mark.parametrize("what", ["slots", "cache", "parts"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_too_early_is_found(what, name):
    """Where the way has a kernel ahead that writes it, and launches attention before that has ended."""
    way = chain_ways.ways(FakeChain(early=what))[name]
    written = {"slots": way.topk, "cache": way.write, "parts": True}[what]
    if written and name != "chain, ordinary launches":
        with pytest.raises(RuntimeError, match=f"{name} reads what is not there yet"):
            chain_ways.check({name: way})
    else:
        chain_ways.check({name: way})


def test_another_selection_is_told_from_another_order():
    found = chain_ways.ways(FakeChain(wrong_topk=True))
    with pytest.raises(RuntimeError, match="chain: its top-k chose other slots"):
        chain_ways.check(found)
