"""SGLang's top-k kernels without their GPU: what the indexer hands to each, computed in torch as the kernels are documented."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.indexer.topk import PagedTopK, SglTopK, TorchTopK, choose_topk

TOPK, PAGE = 5, 64
GPU = torch.device("cuda")


class Kernels:
    """The kernels of both generations; `called` says which were."""

    def __init__(self):
        self.called: list[str] = []

    def best(self, logits, lengths, row_starts):
        return TorchTopK().positions(logits, lengths, TOPK, row_starts)

    def fast_topk_v2(self, logits, lengths, topk, row_starts=None):
        self.called.append("positions")
        assert topk == TOPK
        return self.best(logits, lengths, row_starts)

    def fast_topk_transform_fused(self, *, score, lengths, page_table_size_1, cu_seqlens_q, topk):
        self.called.append("fused")
        assert topk == TOPK
        owner = torch.repeat_interleave(torch.arange(len(cu_seqlens_q) - 1), cu_seqlens_q.diff().long())
        best = self.best(score, lengths, None)
        slots = torch.gather(page_table_size_1[owner], 1, best.clamp(min=0).long())
        return torch.where(best < 0, -1, slots)

    def fast_topk_transform_ragged_fused(self, *, score, lengths, topk_indices_offset, topk, row_starts):
        self.called.append("ragged")
        assert topk == TOPK
        best = self.best(score, lengths, row_starts)
        return torch.where(best < 0, -1, best + topk_indices_offset[:, None])

    def paged(self, logits, lengths, table, out, page_size, plan):
        self.called.append("paged")
        assert page_size == PAGE
        assert plan == "plan"
        assert out.dtype == torch.int32
        best = self.best(logits, lengths, None)
        page = torch.gather(table, 1, best.clamp(min=0).long() // PAGE)
        out.copy_(torch.where(best < 0, -1, page * PAGE + best % PAGE))

    def windowed(self, logits, lengths, *, out_offsets, out_indices, row_starts):
        self.called.append("windowed")
        assert out_indices.dtype == torch.int32
        best = self.best(logits, lengths, row_starts)
        out_indices.copy_(torch.where(best < 0, -1, best + out_offsets[:, None]))


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    names = ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused")
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(**{name: getattr(found, name) for name in names}))
    return found


def selector(kernels: Kernels, kind: str):
    if kind == "sgl":
        return SglTopK()
    return PagedTopK(kernels.paged, kernels.windowed if kind == "paged and windowed" else None)


def rows(seed: int = 0, requests: int = 2):
    """Logits of two rows a request, with windows in them, and metadata whose tables say one thing in two ways."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * requests
    lengths = torch.randint(1, 150, (count,), generator=generator, dtype=torch.int32)
    starts = torch.randint(0, 40, (count,), generator=generator, dtype=torch.int32)
    pages = torch.randperm(3 * requests, generator=generator).view(requests, 3).int()
    slots = (64 * pages[..., None] + torch.arange(64)).flatten(1).int()
    metadata = SimpleNamespace(
        page_table_1=slots,
        real_page_table=pages.repeat_interleave(2, 0),
        table_rows=torch.arange(count, dtype=torch.int32),
        cu_seqlens_q=torch.arange(0, count + 1, 2, dtype=torch.int32),
        topk_indices_offset=None,
        topk_plan="plan",
    )
    return torch.randn(count, 192, generator=generator), lengths, starts, metadata


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """In whatever order."""
    return got.dtype == torch.int32 and torch.equal(got.sort(1).values, want.sort(1).values.int())


@pytest.mark.parametrize(
    ("kind", "positions", "windows", "keys", "slots"),
    [
        ("sgl", "positions", "positions", "ragged", "fused"),
        ("paged", "positions", "positions", "ragged", "paged"),
        ("paged and windowed", "positions", "windowed", "windowed", "paged"),
    ],
)
@pytest.mark.parametrize("requests", [1, 4])
def test_each_question_goes_to_the_kernel_that_answers_it(kernels, kind, positions, windows, keys, slots, requests):
    ours, torchs = selector(kernels, kind), TorchTopK()
    for seed, count in enumerate((requests, 6, requests)):
        logits, lengths, starts, metadata = rows(seed, count)
        offsets = 100 * torch.arange(2 * count, dtype=torch.int32)
        kernels.called.clear()
        assert same(ours.positions(logits, lengths, TOPK, None), torchs.positions(logits, lengths, TOPK, None))
        assert same(ours.positions(logits, lengths, TOPK, starts), torchs.positions(logits, lengths, TOPK, starts))
        got = ours.positions(logits, lengths, TOPK, starts, offsets)
        assert same(got, torchs.positions(logits, lengths, TOPK, starts, offsets))
        assert same(ours.slots(logits, lengths, TOPK, metadata), torchs.slots(logits, lengths, TOPK, metadata))
        assert kernels.called == [positions, windows, keys, slots]


def test_zeros_of_a_prefill_are_written_before_its_layers(kernels, monkeypatch):
    """SGLang's windowed kernel reads offsets before it waits for the kernel ahead of it."""
    ours = selector(kernels, "paged and windowed")
    for requests in (1, 4, 2):
        logits, lengths, starts, _ = rows(requests, requests)
        ours.prepare(lengths)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", None)
            assert same(ours.positions(logits, lengths, TOPK, starts), TorchTopK().positions(logits, lengths, TOPK, starts))


def test_without_a_table_of_tokens_positions_are_turned_through_pages(kernels):
    logits, lengths, _, metadata = rows()
    metadata.page_table_1 = None
    assert same(SglTopK().slots(logits, lengths, TOPK, metadata), TorchTopK().slots(logits, lengths, TOPK, metadata))
    assert kernels.called == ["positions"]


@pytest.mark.parametrize(("offered", "kind"), [(None, SglTopK), ((1, None), PagedTopK)])
def test_the_release_decides_which_kernels_select(kernels, monkeypatch, offered, kind):
    monkeypatch.setattr(adapter, "topk_v2", lambda: offered)
    assert type(choose_topk(GPU)) is kind
    assert type(choose_topk(torch.device("cpu"))) is TorchTopK
