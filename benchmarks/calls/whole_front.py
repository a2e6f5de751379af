"""The section `whole_front` of bench attention: a layer up to its index scores, projections and writes to both caches with it.

SGLang's own layer and the same with our front, each as captured graphs record it, on two streams. The selection is left out on
both sides, and a layer that shares an earlier one has none. Layers take turns, so that no weight is in the L2 cache.

On bfloat16 KV also up to o_proj's output: attention, the same on all sides, is sparse_decode over tokens of a cache of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from nsa_backend.benchmarks.calls.layer_front import cells_of, microseconds
from nsa_backend.benchmarks.calls.timing import captured_graph, kernel_us
from nsa_backend.benchmarks.calls.whole_layer import POSITIONS, SHAPES, TOPK, whole_layer
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.kernels.norm_rope_store import INDEX_PAGE_BYTES
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.sparse_decode import sparse_decode
from nsa_backend.kernels.value_products import MOST_ROWS
from nsa_backend.testing.shape import LATENT, ROPE

ROWS = (1, 4, 8, 16, 32, 64, 128)
LAYERS = 8
"""Whose weights take 300 MB or more."""
SMS = 132


class Backend:
    """As much of ours as a layer asks for."""

    def __init__(self, pool: Any):
        self.token_to_kv_pool = pool

    def get_indexer_metadata(self, layer_id: int, batch: Any) -> object:
        return object()


def cells(rows: list[int] | None, samples: int) -> list[Cell]:
    """A cell a model, KV dtype and number of rows; none where the release has other layers."""
    return cells_of("whole_front", SHAPES, rows or ROWS, measure, samples)


def measure(model: str, kv: str, rows: int, samples: int) -> list[dict]:
    """One row of microseconds and launches a layer by side, and the least and the most."""
    with fronts(model, kv, rows, whole=kv == "bf16") as sides:
        graphs = {name: captured_graph(lambda calls=calls: [call() for call in calls]) for name, calls in sides.items()}
    launches = {name: round(kernel_us(graph.replay, 1)[1] / LAYERS, 1) for name, graph in graphs.items()}
    return [{"model": model, "kv": kv, "rows": rows} | microseconds(graphs, LAYERS, samples) | {"launches": launches}]


def show(rows: list[dict]) -> None:
    """A line a cell and side."""
    table = [
        (r["model"], r["kv"], r["rows"], name, us, "{:.2f} to {:.2f}".format(*r["min_max"][name]), r["launches"][name])
        for r in rows
        for name, us in r["us"].items()
    ]
    if table:
        print_table(("model", "KV", "rows", "front", "us a layer", "least to most", "launches"), table)


@contextlib.contextmanager
def fronts(
    model: str, kv: str, rows: int, device: str = "cuda", *, whole: bool = False
) -> Iterator[dict[str, list[Callable[[], tuple[torch.Tensor, ...]]]]]:
    """By side, a call a layer; while it lasts SGLang's layer is as captures of target_verify have it, but for its selection.

    A call returns the rotated part of the query, its absorbed part, and both caches, which all layers share. Sides that go on
    to o_proj, where they are asked for as the `whole` layer, return its output and the caches.
    """
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from nsa_backend.adapters.dsa.layer_front.builtin import write_kv
    from nsa_backend.adapters.dsa.layer_front.front import LayerFront
    from nsa_backend.adapters.dsa.layer_front.values import LayerValues

    stream = torch.cuda.Stream() if device == "cuda" else None
    layers = [whole_layer(model, stream, device) for _ in range(LAYERS)]
    pool = one_layers_pool(-(-rows // PAGE_SIZE) + 1, kv, device)
    x = torch.randn(rows, SHAPES[model]["hidden"], device=device).bfloat16()
    positions, slots = torch.randint(POSITIONS, (rows,), device=device), PAGE_SIZE + torch.arange(rows, device=device)
    chosen = torch.zeros(rows, TOPK, dtype=torch.int32, device=device)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, out_cache_loc=slots, seq_lens=torch.ones(rows), seq_lens_cpu=torch.ones(rows),
        attn_cp_metadata=None,
    )  # fmt: skip
    asked = SimpleNamespace(input_scattered=False, layer=None)
    asked.fetch_qkv_latent = lambda: asked.layer.prepare_qkv_latent(x, batch)

    def call(layer: Any, prepare: Callable, core: Callable | None = None) -> tuple[torch.Tensor, ...]:
        asked.layer = layer
        selection = chosen if layer.indexer is None else None
        found = prepare(positions, x, batch, None, None, selection)
        q_rope, k_rope, q_nope, k_nope, *_ = found
        if k_nope is not None:
            write_kv(pool.kv, slots, k_nope, k_rope)
        of_layer = (q_rope, q_nope) if core is None else (core(*found[:8], None),)
        return *of_layer, pool.kv, pool.index_keys

    def sides(own: DeepseekV2AttentionMLA) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
        front, prepare, core = LayerFront(own, (Backend,)), own.forward_absorb_prepare, own.forward_absorb_core
        found = {"ours": (front,), "SGLang's": (prepare,)}
        if whole:
            attend_to_others(own, rows, device)
            found |= {"ours, to o_proj": (front, core), "SGLang's, to o_proj": (prepare, core)}
            together = LayerValues(own)
            together.most_rows = MOST_ROWS  # where a server has them by two launches too
            found["ours with values in one launch, to o_proj"] = front, together
        return {name: functools.partial(call, own, *parts) for name, parts in found.items()}

    patched = (
        mock.patch.object(dsa_indexer.Indexer, "_get_topk_paged", return_value=chosen),
        mock.patch.object(forward_mla.DeepseekMLAForwardMixin, "_fuse_rope_for_trtllm_mla", return_value=False),
        mock.patch.object(forward_mla, "get_attn_tp_context", return_value=asked),
        mock.patch("sglang.srt.layers.layer_boundary.get_attn_tp_context", return_value=asked),
    )
    with contextlib.ExitStack() as stack:
        for patch in (*patched, model_capture_mode(), torch.no_grad()):
            stack.enter_context(patch)
        stack.enter_context(forward_context(ForwardContext(attn_backend=Backend(pool))))
        by_layer = [sides(layer) for layer in layers]
        yield {name: [of_layer[name] for of_layer in by_layer] for name in by_layer[0]}


def attend_to_others(layer: Any, rows: int, device: str) -> None:
    """Have `layer` attend by sparse_decode to TOPK tokens a row of a cache that it alone has."""
    count = rows * TOPK
    kv = torch.randn(count, 1, LATENT + ROPE, device=device).bfloat16()
    slots = torch.randperm(count, device=device).view(rows, TOPK).int()
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device=device)

    def attend(q: torch.Tensor, *_: object, q_rope: torch.Tensor, **__: object) -> torch.Tensor:
        return sparse_decode(q, q_rope, kv, slots, lens, layer.scaling, num_sms=SMS)

    layer.attn_mqa.forward = attend
    layer.w_vc = torch.randn(layer.num_local_heads, layer.v_head_dim, LATENT, device=device).bfloat16().transpose(1, 2)


def one_layers_pool(pages: int, kv: str, device: str) -> Any:
    """SGLang's own, of one layer, without what else it allocates."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    width, dtype = (576, torch.bfloat16) if kv == "bf16" else (656, torch.float8_e4m3fn)
    pool = DSATokenToKVPool.__new__(DSATokenToKVPool)
    pool.kv = torch.zeros(pages * PAGE_SIZE, 1, width, device=device).to(dtype)
    pool.index_keys = torch.zeros(pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)
    pool.index_page_size, pool.get_key_buffer = PAGE_SIZE, lambda layer_id: pool.kv
    pool.get_index_k_with_scale_buffer = lambda layer_id: pool.index_keys
    return pool
