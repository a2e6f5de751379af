"""The section `layer_front` of bench attention: launches in front of a layer and behind its attention beside what they replace.

Each is one captured graph on one stream, without the projections between: what it shows is the least that a layer can gain, as
fewer launches also leave fewer waits. SGLang runs some of its kernels on a second stream; its sum here is an upper bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.calls.whole_layer import SHAPES
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.norm_rope_store import INDEX_PAGE_BYTES, norm_rope_store
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.rope_quantise import rope_quantise
from nsa_backend.kernels.value_products import value_counters, value_products
from nsa_backend.releases import layer_front_problem

ROWS = (1, 4, 8, 32, 128)
REPEATS = 32
MODELS = [model for model, shape in SHAPES.items() if shape["index_heads"]]


def cells(rows: list[int] | None, samples: int) -> list[Cell]:
    return cells_of("layer_front", MODELS, rows or ROWS, measure, samples)


def cells_of(
    section: str, models: Iterable[str], rows: Sequence[int], measure: Callable[[str, str, int, int], list[dict]], samples: int
) -> list[Cell]:
    """A cell of `section` a model, KV dtype and number of rows; none where the release has other layers."""
    if layer_front_problem() is not None:
        return []
    return [
        Cell(f"{section}, {model}, {kv}, {n} rows", functools.partial(measure, model, kv, n, samples), section)
        for model in models
        for kv in ("bf16", "fp8")
        for n in rows
    ]


def measure(model: str, kv: str, rows: int, samples: int) -> list[dict]:
    """One row of microseconds a call, and the least and the most."""
    calls = front_calls(model, kv, rows)
    graphs = {name: captured_graph(lambda call=call: [call() for _ in range(REPEATS)]) for name, call in calls.items()}
    return [{"model": model, "kv": kv, "rows": rows} | microseconds(graphs, REPEATS, samples)]


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int, samples: int) -> dict[str, dict]:
    """Of one of a graph's `repeats` calls, by name: the median, and the least and the most."""
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, repeats, samples)
    return {
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
    }


def show(rows: list[dict]) -> None:
    """A line a launch or sequence."""
    table = [
        (r["model"], r["kv"], r["rows"], name, us, "{:.2f} to {:.2f}".format(*r["min_max"][name]))
        for r in rows
        for name, us in r["us"].items()
    ]
    if table:
        print_table(("model", "KV", "rows", "what", "us", "least to most"), table)


def front_calls(model: str, kv: str, rows: int) -> dict[str, Callable[[], object]]:
    """Our launches and SGLang's sequences, by name."""
    from nsa_backend.adapters.dsa.layer_front import builtin
    from nsa_backend.adapters.dsa.layer_front.rule import weights_of
    from nsa_backend.testing.front_layer import POSITIONS, front_layer
    from nsa_backend.testing.shape import LATENT, ROPE

    heads, q_rank, fused, values = (SHAPES[model][name] for name in ("heads", "q_rank", "neighbours", "v"))
    layer, pages = front_layer(q_rank, heads, fused), -(-rows // PAGE_SIZE) + 1
    weights, index_heads = weights_of(layer), layer.indexer.n_heads
    width, dtype = (LATENT + ROPE, torch.bfloat16) if kv == "bf16" else (656, torch.float8_e4m3fn)
    kv_cache = torch.zeros(pages * PAGE_SIZE, 1, width, device="cuda").to(dtype)
    index_cache = torch.zeros(pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda")
    positions = torch.randint(POSITIONS, (rows,), device="cuda")
    slots = PAGE_SIZE + torch.arange(rows, device="cuda")

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, device="cuda").bfloat16()

    qkv, key, query, q_rope = drawn(q_rank + LATENT + ROPE), drawn(GROUP), drawn(index_heads, GROUP), drawn(heads, ROPE)
    gates = drawn(index_heads) if fused else torch.randn(rows, index_heads, device="cuda")
    written = (positions, slots, kv_cache, index_cache, Scales.EXACT)
    attended, w_vc = drawn(heads, LATENT), torch.randn(heads, values, LATENT, device="cuda").bfloat16().transpose(1, 2)
    arrived = value_counters(w_vc)

    def sglangs_values() -> object:
        out = torch.empty(rows, heads * values, dtype=torch.bfloat16, device="cuda")
        torch.bmm(attended.transpose(0, 1), w_vc, out=out.view(rows, heads, values).transpose(0, 1))
        return builtin.quantised(out, Scales.EXACT)

    with torch.no_grad():
        return {
            "norm_rope_store": lambda: norm_rope_store(qkv, key, weights, *written),
            "SGLang's norms, RoPE and writes": lambda: builtin.norm_rope_store(layer, qkv, key, *written),
            "rope_quantise": lambda: rope_quantise(query, gates, q_rope, weights, positions),
            "SGLang's queries and gates": lambda: builtin.rope_quantise(layer, query, gates, q_rope, positions),
            "value_products": lambda: value_products(attended, w_vc, Scales.EXACT, arrived),
            "SGLang's values": sglangs_values,
        }
