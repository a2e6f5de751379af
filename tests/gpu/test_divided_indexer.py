"""Every n-th row of a prefill, as a rank has them, against all rows: scores bit by bit, and selections, by SGLang's kernels."""

from dataclasses import MISSING, fields

import pytest
import torch

from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.indexer.topk import choose_topk
from nsa_backend.metadata.views import NSAMetadata
from nsa_backend.releases import divided_indexer_problem
from nsa_backend.testing.process import start_sglang

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(divided_indexer_problem() is not None, reason="indexers of this release are others"),
]

TOPK = 2048
UNUSED = {field.name: None for field in fields(NSAMetadata) if field.default is MISSING}
"""What no selection by positions reads."""


def metadata_of(requests: list[tuple[int, int]]) -> tuple[IndexerMetadata, int]:
    """Of a prefill of (tokens before, new tokens) a request, and how many keys there are."""
    starts, lens, of_row, begin = [], [], [], 0
    for number, (prefix, new) in enumerate(requests):
        starts += [begin] * new
        lens += range(prefix + 1, prefix + new + 1)
        of_row += [number] * new
        begin += prefix + new
    start, length, request = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (starts, lens, of_row))
    rows = {"nsa_seqlens_expanded": length, "token_to_batch_idx": request, "table_rows": request}
    found = NSAMetadata(**UNUSED | rows, indexer_k_start_end=(start, start + length))
    return IndexerMetadata(found, choose_topk(torch.device("cuda")), fuse_topk=False), begin


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("requests", [[(0, 4096)], [(5, 700), (4000, 901), (0, 1), (9000, 333)], [(60_000, 1024)]])
def test_rows_of_a_rank_score_and_select_as_among_all(requests, heads):
    start_sglang()
    from sglang.srt.layers.attention.dsa import dsa_indexer

    whole, keys = metadata_of(requests)
    rows = len(whole.get_seqlens_expanded())
    generator = torch.Generator(device="cuda").manual_seed(rows)
    q = torch.randn(rows, heads, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    gates = torch.rand(rows, heads, generator=generator, device="cuda")
    k = torch.randn(keys, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(keys, generator=generator, device="cuda")

    def selected(metadata: IndexerMetadata, of: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores inside of each row's window, and what is selected."""
        start, end = metadata.get_indexer_kvcache_range()
        score = dsa_indexer.resolve_fp8_mqa_logits_fn()
        logits = score(q[of].contiguous(), (k, scales), gates[of].contiguous(), start, end, clean_logits=False)
        columns = torch.arange(logits.shape[1], device="cuda")
        inside = torch.where((columns >= start[:, None]) & (columns < end[:, None]), logits, 0)
        return inside, metadata.topk_transform(logits, TOPK, ks=start).sort(dim=1).values

    wanted = selected(whole, slice(None))
    for ranks in (2, 3, 8):
        for rank in range(ranks):
            of = slice(rank, rows, ranks)
            for mine, all_rows in zip(selected(whole.of_rows(of), of), wanted, strict=True):
                assert torch.equal(mine, all_rows[of])
