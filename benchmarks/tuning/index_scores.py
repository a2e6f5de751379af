"""Index scores of a verified request's rows, two by two beside one by one, and the top-k that follows.

    python benchmarks/tuning/index_scores.py OUT.json [--heads 64 32] [--requests 8 32 64 1] [--lengths 4096 32768 131072]

A request verifies ROWS rows at the end of its context. DeepGEMM scores them; SGLang's top-k v2 selects 2048 of each row.
Rows of scores are as wide as the longest context that the server takes. Of more rows than SMs SGLang's indexer makes pieces,
which are timed too. Calls repeat in a captured graph over as many index caches as L2 does not hold, variants in turns. Scores
that a row owns are compared bit by bit before they are timed. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.commands.rank_serve import CONTEXT
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import TOPK

ROWS, INDEX_DIM, SAMPLES = 4, 128, 7
TOKEN_BYTES = INDEX_DIM + 4  # a key in 8 bits and its scale
COLD_BYTES = 400 << 20
"""All caches together: several times the 60 MB of an H200's L2."""
SINGLE, PAIRED, SELECT = "one by one", "two by two", "top-k"
PIECES = "one by one in SGLang's pieces"


def caches(tokens: int) -> list[torch.Tensor]:
    """Index keys and scales as SGLang's pool has them, uint8 [pages, 64, 1, 132] each, one a layer."""
    pages = blocks(tokens, PAGE_SIZE)
    found = []
    for _ in range(max(2, blocks(COLD_BYTES, tokens * TOKEN_BYTES))):
        keys = torch.randn(pages, PAGE_SIZE * INDEX_DIM, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(pages, PAGE_SIZE, device="cuda").view(torch.uint8)
        found.append(torch.cat([keys, scales], dim=1).view(pages, PAGE_SIZE, 1, TOKEN_BYTES))
    return found


def metadata(requests: int, length: int, width: int, next_n: int) -> MetadataBuffers:
    """What one launch writes for `requests` that verify ROWS rows each behind `length` tokens, in pages at random places.

    Page tables have room for `width` tokens.
    """
    import deep_gemm

    plan = plans.plan_target_verify(requests, ROWS, next_n)
    buffers = MetadataBuffers.allocate(
        plan, table_width=width, num_sms=deep_gemm.get_num_sms(), device="cuda", wide=False, planned=True
    )
    pages = blocks(length + ROWS, PAGE_SIZE)
    generator = torch.Generator(device="cuda").manual_seed(1)
    tables = torch.randperm(requests * pages, generator=generator, device="cuda").view(requests, pages)
    slots = torch.zeros(requests, width, dtype=torch.int32, device="cuda")
    slots[:, : pages * PAGE_SIZE] = (PAGE_SIZE * tables[..., None] + torch.arange(PAGE_SIZE, device="cuda")).flatten(1)
    lengths = torch.full((requests,), length, device="cuda", dtype=torch.int32)
    write_metadata(
        plan, buffers, BatchInputs(lengths, torch.arange(requests, device="cuda")), req_to_token=slots, index_topk=TOPK,
        surplus_last=adapter.schedule_surplus_last(adapter.device_sm("cuda")),
    )  # fmt: skip
    return buffers


def cell(heads: int, requests: int, length: int, context: int) -> dict:
    """Microseconds of a layer's scores in every way and of its top-k."""
    import deep_gemm

    rows, layers = requests * ROWS, caches(requests * (length + 2 * PAGE_SIZE))
    width, num_sms = max(context, length + 2 * PAGE_SIZE), deep_gemm.get_num_sms()
    q = torch.randn(rows, heads, INDEX_DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.rand(rows, heads, device="cuda")
    of_rows = {next_n: metadata(requests, length, width, next_n) for next_n in (1, 2)}

    def scores(next_n: int) -> Callable[[int], torch.Tensor]:
        buffers, query = of_rows[next_n], q.view(-1, next_n, heads, INDEX_DIM)
        lens, pages = buffers.seqlens_expanded[0].view(-1, next_n), buffers.real_page_table[::next_n]
        return lambda i: deep_gemm.fp8_paged_mqa_logits(
            query, layers[i % len(layers)], weights, lens, pages, buffers.schedule[0], buffers.table_width, clean_logits=False
        )

    def in_pieces(i: int) -> torch.Tensor:
        buffers, found = of_rows[1], []
        for start in range(0, rows, num_sms):
            piece = slice(start, start + num_sms)
            lens = buffers.seqlens_expanded[0][piece, None]
            schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, num_sms)
            found.append(
                deep_gemm.fp8_paged_mqa_logits(
                    q[piece, None], layers[i % len(layers)], weights[piece], lens, buffers.real_page_table[piece], schedule,
                    buffers.table_width, clean_logits=False,
                )
            )  # fmt: skip
        return torch.cat(found)

    one, two, lens = scores(1)(0), scores(2)(0), of_rows[1].seqlens_expanded[0]
    own = torch.arange(one.shape[1], device="cuda") < lens[:, None]
    select, chosen = adapter.topk_v2()[0], torch.empty((rows, TOPK), dtype=torch.int32, device="cuda")
    calls = {
        SINGLE: scores(1),
        PAIRED: scores(2),
        SELECT: lambda i: select(one, lens, of_rows[1].real_page_table, chosen, PAGE_SIZE, of_rows[1].topk_plan[0]),
    }
    calls |= {PIECES: in_pieces} if rows > num_sms else {}
    repeats = max(8, len(layers))
    graphs = {name: captured_graph(lambda call=call: [call(i) for i in range(repeats)]) for name, call in calls.items()}
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, repeats, SAMPLES)
    return {
        "index_heads": heads,
        "rows_per_request": ROWS,
        "requests": requests,
        "length": length,
        "context": width,
        "equal": all(
            torch.equal(torch.where(own, one, 0), torch.where(own, other, 0))
            for other in (two, *([in_pieces(0)] if PIECES in calls else []))
        ),
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
    }


def show(found: list[dict]) -> None:
    """Times and the ratio of pairs over single rows."""
    columns = (SINGLE, PAIRED, SELECT, PIECES)
    table = [
        (
            r["index_heads"],
            r["requests"],
            r["length"],
            *map(r["us"].get, columns),
            r["us"][PAIRED] / r["us"][SINGLE],
            r["equal"],
        )
        for r in found
    ]
    print_table(("index heads", "requests", "tokens", *columns, "pairs / single", "equal bits"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 32], help="of the indexer: 64 or, in GLM-5, 32")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32, 64, 1])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens that a row of the page table has room for")
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for heads, requests, length in itertools.product(args.heads, args.requests, args.lengths):
        found.append(cell(heads, requests, length, args.context))
        write_report(args.out, {"environment": environment(), "rows": found})
        show(found[-1:])
        torch.cuda.empty_cache()
    show(found)


if __name__ == "__main__":
    main()
