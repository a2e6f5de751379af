"""The sections `chain` and `parts` of bench attention: a layer of decode from the indexer's logits to attention.

`chain` is what one layer runs in SGLang's order (top-k, KV write, attention) as one piece, beside the sum of its kernels alone,
with other launches, and without one of its kernels: no fusion of a kernel with its neighbour can gain more than leaving it out.
`parts` is what choices of the backend around these kernels cost: how wide page tables are, whose plan the top-k reads, who
schedules FA3's tiles and into how many splits. Requests have 4096 tokens. Calls repeat inside a captured graph, variants in
turns; the KV that attention reads is found in no cache, the keys of the indexer may be.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls import sm90_kernels
from nsa_backend.benchmarks.calls.attention_case import SLOTS, Case
from nsa_backend.benchmarks.calls.chain_case import CONTEXT, TABLE, Chain, Indexer, repeats
from nsa_backend.benchmarks.calls.chain_ways import Way, check, ways
from nsa_backend.benchmarks.calls.sm90_case import Shape, Sm90Case
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.calls import calls as sglang

HEADS, CHAIN_ROWS, PARTS_ROWS = (16, 128), (1, 2, 4, 8), (1, 8, 32, 64)
NARROW = CONTEXT + 4 * PAGE_SIZE  # tokens that a page table need reach
Call = Callable[[int], object]


def cells(heads: Iterable[int] | None, rows: list[int] | None, samples: int) -> list[Cell]:
    """A cell a KV dtype, head count and number of rows; none where the release has no top-k through pages."""
    if adapter.topk_v2() is None:
        return []
    found = []
    for kv in ("bf16", "fp8"):
        for count in heads or HEADS:
            make = functools.cache(functools.partial(Case, kv, count))
            for n in rows or CHAIN_ROWS:
                measure = functools.partial(measure_chain, make, n, samples)
                found.append(Cell(f"chain, {kv}, {count} heads, {n} rows", measure, "chain"))
    for n in rows or PARTS_ROWS:
        found.append(Cell(f"parts, indexer, {n} rows", functools.partial(measure_indexer, n, samples), "parts"))
        for count in heads or HEADS:
            measure = functools.partial(measure_fa3, count, n, samples)
            found.append(Cell(f"parts, FA3, {count} heads, {n} rows", measure, "parts"))
    return found


def measure_chain(make: Callable[[], Case], rows: int, samples: int) -> list[dict]:
    """One row; raises RuntimeError where a way to run the chain reads what is not there yet."""
    chain = Chain(make(), rows)
    try:
        calls = chain_calls(chain)
        check({name: call for name, call in calls.items() if isinstance(call, Way)})
        return [row_of({"kv": chain.case.kv, "heads": chain.heads, "rows": rows}, calls, rows, samples)]
    finally:
        chain.restore()


def chain_calls(chain: Chain) -> dict[str, Call]:
    """Every part alone, and every way to run the chain, by name."""
    return {"top-k": chain.topk, "KV write": chain.write, **ways(chain)}


def measure_indexer(rows: int, samples: int) -> list[dict]:
    """One row: logits and top-k with tables as wide as a server's and no wider than needed, and with SGLang's plan."""
    wide, narrow = (Indexer(rows, SLOTS // PAGE_SIZE, table) for table in (TABLE, NARROW))
    calls: dict[str, Call] = {}
    for name, indexer in {"wide": wide, "narrow": narrow}.items():
        calls[f"logits, {name} tables"] = indexer.logits
        calls[f"top-k, {name} tables"] = indexer.topk
        calls[f"logits and top-k, {name} tables"] = lambda i, indexer=indexer: indexer.topk(i, indexer.logits(i))
    theirs = sglang.topk_plan(wide.metadata.nsa_seqlens_expanded)
    calls["top-k, wide tables, SGLang's plan"] = functools.partial(wide.topk, plan=theirs)
    return [row_of({"part": "indexer", "rows": rows}, calls, rows, samples)]


def measure_fa3(heads: int, rows: int, samples: int) -> list[dict]:
    """One row: FA3 with its tiles scheduled in the call, once, and with a bound on the splits of a row."""
    shape = Shape("decode", "bf16", heads, rows, "full")
    case = Sm90Case(shape)
    made = {name: v.make(case) for name, v in sm90_kernels.variants(shape).items() if name.startswith("fa3")}
    return [row_of({"part": "FA3", "heads": heads, "rows": rows}, made, rows, samples)]


def row_of(what: dict, calls: dict[str, Call], rows: int, samples: int) -> dict:
    """Median microseconds of a call of each, and the least and the most; told at once, for a run that is cut."""
    n = repeats(rows)
    graphs = {name: captured_graph(lambda call=call: [call(i) for i in range(n)]) for name, call in calls.items()}
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, n, samples)
    row = what | {"us": {name: round(us, 2) for name, (us, _) in times.items()}}
    row["min_max"] = {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()}
    print(", ".join(map(str, what.values())), row["us"], file=sys.stderr)
    return row


def show(rows: list[dict]) -> None:
    """A line a variant; of a chain also the sum of its kernels alone."""
    table = []
    for row in rows:
        title = ", ".join(f"{value} {key}" if key in ("heads", "rows") else str(value) for key, value in shape_of(row).items())
        table += [(title, name, us, "{:.2f} to {:.2f}".format(*row["min_max"][name])) for name, us in row["us"].items()]
        if "sparse_decode" in row["us"]:
            alone = sum(row["us"][name] for name in ("top-k", "KV write", "sparse_decode"))
            table.append((title, "the kernels of the chain alone, added up", alone, None))
    if table:
        print_table(("shape", "what", "us", "least to most"), table)


def shape_of(row: dict) -> dict:
    return {key: row[key] for key in ("part", "kv", "heads", "rows") if key in row}
