"""Prefills of few tokens in one graph, where no request has more than index_topk of them.

SGLang 0.5.23 captures a prefill in pieces: every layer's indexer and attention run from the host in between, some thirty calls
of Python and as many launches. A prompt of 300 tokens waits for them, not for the GPU. Where requests are short the indexer
selects nothing: every row attends to all of its tokens, whose slots are the same in all layers. So our front stands before
attention as in captured decode, attention reads slots that are written before the replay, and nothing is left in between.

Some sizes up to MOST_ROWS are captured twice, and which of both is replayed is told by the lengths, which the host knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs

from nsa_backend.adapters.dsa.layer_front.options import needed, server_problems
from nsa_backend.adapters.dsa.rounds import served
from nsa_backend.adapters.dsa.rounds.capture import MIB, free_bytes
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode, HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import asked, switched_on
from nsa_backend.kernels.batch_inputs import PADDING_SLOT
from nsa_backend.releases import layer_front_problem

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
SWITCH = "NSA_BACKEND_SHORT_PREFILLS"

MOST_ROWS = 512
"""Tokens of the largest prefill that is captured whole; of more the GPU takes as long as the host does with the pieces."""

MOST_PADDING = 64
"""Rows of padding that a whole graph may have, or half of its rows: 12 graphs, where SGLang has 30 of up to MOST_ROWS."""

NEEDED = (
    *served.DP_ATTENTION,
    needed("dcp_size", "--dcp-size", (None, 1)),
    needed("pp_size", "--pp-size", (1,), "pass --pp-size 1"),
    # Their dispatch leaves the graph in every layer of experts.
    needed("moe_a2a_backend", "--moe-a2a-backend", ("none",)),
    # Ranks then tell one another their sizes before every prefill, which has run beside none.
    needed("moe_dense_tp_size", "--moe-dense-tp-size", (None,)),
    needed("kv_cache_dtype", "--kv-cache-dtype", ("auto", "bfloat16"), "pass --kv-cache-dtype bfloat16"),
    needed("enable_return_indexer_topk", "--enable-return-indexer-topk", (None, False)),
    needed(
        "dsa_prefill_backend",
        "--dsa-prefill-backend",
        (None, "auto", "flashmla_auto", "flashmla_sparse"),
        "pass --dsa-prefill-backend flashmla_sparse",
    ),
    needed(
        "cuda_graph_config.prefill.backend",
        "--cuda-graph-backend-prefill",
        ("breakable",),
        "pass --cuda-graph-backend-prefill breakable",
    ),
)
"""Beside what the front asks: prefills that SGLang captures in pieces, whose rows FlashMLA's sparse kernel attends for."""


def prefill_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no whole graphs of prefills."""
    found = server_problems(args)
    if asked("NSA_BACKEND_LAYER_FRONT") is False:
        found.append("NSA_BACKEND_LAYER_FRONT=0 leaves SGLang's front, and they need ours: unset one")
    if switched_on("NSA_BACKEND_CHECK"):
        found.append("NSA_BACKEND_CHECK=1 has run beside no whole graph of a prefill: unset one")
    if layer_front_problem() is not None:
        return found
    if not envs.SGLANG_DSA_FUSE_TOPK.get():
        found.append("SGLANG_DSA_FUSE_TOPK=0 makes selections of positions, and they need slots: unset one")
    backends = {own or args.attention_backend for own in (args.prefill_attention_backend, args.decode_attention_backend)}
    if len(backends) > 1:
        found.append(f"prefill and decode have backends of two names, {' and '.join(sorted(backends))}: name one for both")
    return found + [f"{rule.option} has none: {rule.advice}" for rule in NEEDED if not rule.serves(args)]


def whole_sizes(captured: Iterable[int]) -> list[int]:
    """Of SGLang's sizes, those of `captured` tokens, the ones that have a whole graph: in ascending order."""
    sizes: list[int] = []
    for size in sorted(captured, reverse=True):
        if not sizes or size <= max(sizes[-1] - MOST_PADDING, sizes[-1] // 2):
            sizes.append(size)
    return sizes[::-1]


class ShortPrefills:
    """Of one model: what whole graphs read, and which prefills take them."""

    def __init__(self, index_topk: int):
        self.index_topk = index_topk
        self.graphs: dict[Any, EitherGraph] = {}
        """By SGLang's key of a captured size."""
        self.sizes: list[int] = []
        """Which these are, in ascending order, once all are captured."""
        self.seconds, self.taken = 0.0, 0
        self.replayed = False
        self._lens: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None

    def of_rows(self, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [rows] tokens of each row, and int32 [rows, index_topk] their slots; padding until `fill` writes them."""
        if self._slots is None:
            self._lens = torch.empty(MOST_ROWS, dtype=torch.int32, device=device)
            self._slots = torch.empty(MOST_ROWS, self.index_topk, dtype=torch.int32, device=device)
            _pad(self._lens, self._slots)
        return self._lens[:rows], self._slots[:rows]

    def take(self, batch: ForwardBatch) -> bool:
        """Whether no request of this prefill has more tokens than the indexer selects."""
        return batch.forward_mode == ForwardMode.EXTEND and int(batch.seq_lens_cpu.max()) <= self.index_topk

    def fill(self, metadata: Any, padded: int) -> None:
        """Write what the whole graph of `padded` rows reads; `metadata` is the indexer's, of the batch without its padding."""
        of_rows = metadata.attn_metadata.nsa_cache_seqlens_int32
        rows = len(of_rows)  # of the batch's inputs SGLang may have padded some
        lens, slots = self.of_rows(padded, of_rows.device)
        lens[:rows], slots[:rows] = of_rows, metadata.every_token(self.index_topk)
        _pad(lens[rows:], slots[rows:])


def _pad(lens: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows that attend to the padding's slot alone: of none their output would be no number."""
    lens.fill_(1)
    slots.fill_(-1)
    slots[:, 0] = PADDING_SLOT


class EitherGraph:
    """Both graphs of one size, in place of SGLang's. It keeps inputs of the last capture alone: `inputs` are the pieces'."""

    def __init__(self, pieces: Any, whole: Any, inputs: Any):
        self.pieces, self.whole, self.inputs, self.takes_whole = pieces, whole, inputs, False

    def replay(self) -> None:
        (self.whole if self.takes_whole else self.pieces).replay()


_OFFERED: WeakKeyDictionary[torch.nn.Module, ShortPrefills] = WeakKeyDictionary()
"""By model of a runner."""
_recorded: list[ShortPrefills] = []
"""Whose whole graph is being captured, if one is."""


def recorded() -> ShortPrefills | None:
    """Whose whole graph is captured or warmed up now; None outside of that."""
    return _recorded[-1] if _recorded else None


@contextlib.contextmanager
def recording(prefills: ShortPrefills) -> Iterator[None]:
    """While a prefill is captured whole."""
    _recorded.append(prefills)
    try:
        yield
    finally:
        _recorded.pop()


def selection(backend: Any, rows: int) -> torch.Tensor:
    """int32 [rows, index_topk], what every layer of the forward that is recorded attends to; `backend` reads its lengths."""
    lens, slots = recorded().of_rows(rows, backend.forward_metadata.nsa_cache_seqlens_int32.device)
    backend.forward_metadata = dataclasses.replace(backend.forward_metadata, nsa_cache_seqlens_int32=lens, schedule=None)
    return slots


class WholeAttention:
    """In place of the forward of a layer's RadixAttention, which leaves the graph in every captured prefill."""

    def __init__(self, attention: Any):
        self.attention, self.own = attention, attention.forward

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: Any, batch: ForwardBatch, save_kv_cache: bool = True, **mla_args: Any
    ) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if recorded() is None or k is not None:
            return self.own(q, k, v, batch, save_kv_cache, **mla_args)
        return get_attn_backend().forward(q, k, v, self.attention, batch, save_kv_cache, **mla_args)


def offer(model: torch.nn.Module, layers: list[Any], index_topk: int) -> None:
    """Have SGLang's runner capture both graphs of few tokens; before it is built.

    Args:
        model: whose prefills they are.
        layers: all DeepseekV2AttentionMLA of it, which have our front.
        index_topk: tokens that the indexer selects.
    """
    _OFFERED[model] = ShortPrefills(index_topk)
    for layer in layers:
        layer.attn_mqa.forward = WholeAttention(layer.attn_mqa)
    hook(f"{RUNNER}.capture", _capture, HookType.AROUND)
    hook(f"{RUNNER}.capture_one_shape", _capture_size, HookType.AROUND)
    hook(f"{RUNNER}.load_batch", _load, HookType.AROUND)
    hook(f"{RUNNER}._prepare_forward_metadata_for_replay", _before_replay, HookType.AROUND)


def _capture(original: Callable, runner: Any) -> None:
    """Around what captures all sizes.

    Raises:
        ValueError: no size has a whole graph; says what to change.
    """
    original(runner)
    prefills = _OFFERED.get(runner.model_runner.model)
    if prefills is None:
        return
    if not prefills.graphs:
        raise ValueError(
            f"{SWITCH}=1 and no captured prefill has up to {MOST_ROWS} tokens for FlashMLA: pass a smaller "
            "--cuda-graph-bs-prefill, or --dsa-prefill-backend flashmla_sparse, or unset it"
        )
    prefills.sizes = sorted(key.size for key in prefills.graphs)
    logger.info(
        "nsa_backend: captured prefills of %s tokens whole, of requests within %d, in %.1f s, %.0f MiB",
        prefills.sizes,
        prefills.index_topk,
        prefills.seconds,
        prefills.taken / MIB,
    )


def _capture_size(original: Callable, runner: Any, size: int, **options: Any) -> None:
    """Around what captures the graphs of one size.

    Raises:
        ValueError: a layer leaves the graph that was to be whole.
    """
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    original(runner, size, **options)
    prefills, backend = _OFFERED.get(runner.model_runner.model), runner.model_runner.attn_backend
    if prefills is None or any(options.values()):
        return
    if size not in whole_sizes(n for n in runner.capture_num_tokens if n <= MOST_ROWS and backend.takes_slots(n)):
        return
    device = backend.forward_metadata.nsa_cache_seqlens_int32.device
    began, free = time.perf_counter(), free_bytes(device)
    # Of no graph's memory, and a padded query that all layers share, where each would clear one of its own.
    prefills.of_rows(size, device)
    backend.prefill_attention.reserve(MOST_ROWS)
    key, graphs = ShapeKey(size=size), runner.backend._graphs
    pieces, inputs = graphs[key], runner.backend._capture_inputs[key]
    with recording(prefills):
        original(runner, size)
    if pieces_of := len(graphs[key]._segments) - 1:
        raise ValueError(f"{SWITCH}=1 and a prefill of {size} tokens leaves its graph {pieces_of} times: unset it")
    prefills.graphs[key] = graphs[key] = EitherGraph(pieces, graphs[key], inputs)
    prefills.seconds += time.perf_counter() - began
    prefills.taken += free - free_bytes(device)


def _load(original: Callable, runner: Any, batch: ForwardBatch, **options: Any) -> Any:
    """Around what pads a prefill to a captured size: a short one to one that has a whole graph."""
    prefills = _OFFERED.get(runner.model_runner.model)
    if prefills is None or not prefills.take(batch) or len(batch.input_ids) > prefills.sizes[-1]:
        return original(runner, batch, **options)
    captured, runner.capture_num_tokens = runner.capture_num_tokens, prefills.sizes
    try:
        return original(runner, batch, **options)
    finally:
        runner.capture_num_tokens = captured


def _before_replay(original: Callable, runner: Any, batch: ForwardBatch, static: ForwardBatch, key: Any) -> Any:
    """Around what makes metadata for a replay, from which a whole graph takes lengths and slots."""
    found, of_runner = original(runner, batch, static, key), runner.model_runner
    prefills = _OFFERED.get(of_runner.model)
    graph = None if prefills is None else prefills.graphs.get(key)
    if graph is not None:
        graph.takes_whole = prefills.take(batch)
        if graph.takes_whole:
            prefills.fill(of_runner.attn_backend.get_indexer_metadata(0, batch), key.size)
            if not prefills.replayed:
                logger.info("nsa_backend: a prefill ran in one graph, the first of %d tokens", key.size)
            prefills.replayed = True
            _wait_for_host_cache(of_runner.token_to_kv_pool)
    return found


def _wait_for_host_cache(pool: Any) -> None:
    """Wait for all KV that a host cache still brings; the pieces wait layer by layer."""
    counter = pool.layer_transfer_counter
    if counter is not None and counter.consumer_index >= 0:
        counter.wait_until(counter.num_layers - 1)
