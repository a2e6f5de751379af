"""Slots of the highest scores: on a GPU as it is, and without one on emulated blocks, whose chunks and shares are small."""

from __future__ import annotations

import pytest
import torch
from emulated import select_emulator, selecting

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.topk_select import (
    BINS,
    CLUSTERS,
    MOST_ROWS,
    SOURCE,
    blocks_of,
    constants,
    problem,
    shared_bytes,
    topk_select,
    topk_select_torch,
)

SHARE = 1024
"""Scores of a row that have a block of their own here; emulated ones have as many in registers."""
LISTED = 2048
"""Scores of one bin that one block tells apart."""


def rows_of(scores: torch.Tensor, lengths: list[int], device: str) -> dict[str, torch.Tensor]:
    """A call's tensors by name: behind a row scores are above all others, and pages are nobody's."""
    generator = torch.Generator().manual_seed(len(lengths))
    scores = scores.clone()
    table = torch.full((len(lengths), scores.shape[1] // PAGE_SIZE + 2), -(2**20), dtype=torch.int32)
    for row, length in enumerate(lengths):
        scores[row, length:] = torch.inf
        pages = -(-length // PAGE_SIZE)
        table[row, :pages] = torch.randperm(5000, generator=generator)[:pages].int()
    given = {"scores": scores, "lengths": torch.tensor(lengths, dtype=torch.int32), "page_table": table}
    return {name: tensor.to(device) for name, tensor in given.items()}


def check(
    scores: torch.Tensor, lengths: list[int], topk: int, blocks: int, device: str, seed: int = 0, bins: int = BINS
) -> None:
    given = rows_of(scores, lengths, device)
    room = torch.full((len(lengths) + 2, topk), -7, dtype=torch.int32, device=device)
    launch = {} if device == "cuda" else {"launch": selecting(blocks, bins, seed)}
    found = topk_select(**given, out=room[1:-1], blocks=blocks, share=SHARE, **launch)
    wanted = topk_select_torch(**given, out=torch.empty_like(found))
    assert torch.equal(found.sort(1).values, wanted.sort(1).values)
    assert bool((room[[0, -1]] == -7).all())
    for row, length in enumerate(lengths):
        assert bool((found[row, min(length, topk) :] == -1).all())


@pytest.mark.parametrize(("blocks", "bins"), [*((blocks, BINS) for blocks in CLUSTERS), (4, 2048)])
@pytest.mark.parametrize(("lengths", "topk"), [([2500, 64, 65, 1, 0, 1027, 4097], 64), ([5003], 2048), ([3000, 2049], 2048)])
def test_slots_are_those_of_the_highest_scores(device, blocks, bins, lengths, topk):
    """Of rows of no block's, of one's and of several's, whose last four scores are not all theirs."""
    scores = torch.randn(len(lengths), 5056, generator=torch.Generator().manual_seed(topk))
    check(scores, lengths, topk, blocks, device, blocks, bins)


ALIKE = {
    "zeros": torch.zeros(5056),
    "zeros of both signs": torch.where(torch.arange(5056) % 3 > 0, 0.0, -0.0),
    "few different ones": (3 * torch.randn(5056, generator=torch.Generator().manual_seed(1))).round(),
    "near each other": 1 + torch.rand(5056, generator=torch.Generator().manual_seed(2)) * 2**-14,
    "negative ones": -torch.rand(5056, generator=torch.Generator().manual_seed(3)),
    "all bits": torch.randint(-(2**31), 2**31, (5056,), generator=torch.Generator().manual_seed(4)).int().view(torch.float32),
    "no numbers": torch.full((5056,), -1, dtype=torch.int32).view(torch.float32),
    "some of them": torch.where(torch.arange(5056) % 5 > 0, -(2**19) + torch.arange(5056) % 3, -1).int().view(torch.float32),
    "infinite ones": torch.tensor([-torch.inf, 1.0, torch.inf, -1.0]).repeat(1264),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize(("blocks", "length", "topk"), [(1, 5001, 700), (4, 5001, 2048), (2, 2047, 100)])
def test_scores_that_are_alike_are_told_apart(device, name, blocks, length, topk):
    """By all of their bits, and where these are the same by position; more than a list has room for are read again."""
    check(ALIKE[name][None], [length], topk, blocks, device)


def test_all_of_a_bin_may_be_wanted(device):
    """No list is needed then, and none is where they are more than it has room for."""
    for above, alike, blocks in ((10, 90, 2), (0, LISTED + 1, 2), (5, 95, 1)):
        scores = torch.full((1, 5056), -1.0)
        scores[0, 7 : 7 + above] = 2.0
        scores[0, 300 : 300 + alike] = 1.0
        check(scores, [5000], min(above + alike, 2048), blocks, device)


def test_a_row_has_as_many_blocks_as_run_at_once():
    assert [blocks_of(rows, 132) for rows in (1, 12, 13, 24, 25, 49, 50, 500)] == [8, 8, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("blocks", CLUSTERS)
def test_it_compiles_for_hopper_with_all_in_registers(blocks):
    _, said = compiled(SOURCE, constants(blocks))
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert select_emulator(blocks, BINS).shared_bytes() == shared_bytes(blocks) <= 232448


def test_what_cannot_be_served_says_so(device):
    given = rows_of(torch.zeros(2, 256), [100, 200], device)
    out = torch.empty(2, 64, dtype=torch.int32, device=device)
    for changed, said in (
        ({"scores": given["scores"].half()}, r"scores must be float32 \[2, width\] with contiguous rows"),
        ({"scores": given["scores"][:, 1:]}, "rows must begin at multiples of 16 bytes"),
        ({"lengths": given["lengths"].long()}, "lengths must be contiguous torch.int32"),
        ({"page_table": given["page_table"][:1]}, r"page_table must be int32 \[2, pages\] with contiguous rows"),
    ):
        with pytest.raises(ValueError, match=said):
            topk_select(**given | changed, out=out)
    with pytest.raises(ValueError, match="3 blocks, one for each 4096 scores: a row has one of"):
        topk_select(**given, out=out, blocks=3)
    with pytest.raises(ValueError, match="top 2049: 1 to 2048 are served"):
        topk_select(**given, out=torch.empty(2, 2049, dtype=torch.int32, device=device))
    assert problem(torch.empty(MOST_ROWS + 1, 4), 64) == f"{MOST_ROWS + 1} rows: up to {MOST_ROWS} are served"
