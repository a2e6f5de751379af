"""Prefills of few tokens in one graph.

SGLang 0.5.23 captures a prefill in pieces: every layer's indexer and attention run from the host in between, some thirty calls
of Python and as many launches. A prompt of 300 tokens, or the next turn of a long chat, waits for them, not for the GPU.

Few new tokens are what a verify is: rows that write their KV, and attend to what their request has up to themselves. So each
row of such a prefill is a request that decodes, with a length and a page table of its own, which the metadata launch writes at
the head of the graph. Our front, index scores by pages, top-k and the decode implementation follow as in captured decode, and
nothing is left in between. Scores of a row are as wide as the longest request that a size takes. Longer ones go in SGLang's
pieces: the GPU then has as much to do as the host.

Some of SGLang's sizes up to MOST_ROWS are captured twice, and which of both is replayed is told by lengths on the host.
Which servers have them: `prefill_rules`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nsa_backend.adapters.dsa.layer_front.prefill_rules import MOST_ROWS, SWITCH, whole_sizes
from nsa_backend.adapters.dsa.rounds.capture import MIB, free_bytes
from nsa_backend.adapters.dsa.rounds.ranks import least_of_ranks
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode, HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import switched_on
from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT, BatchInputs
from nsa_backend.kernels.plan import PAGE_SIZE

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"

MOST_SCORES = 1 << 24
"""Index scores of a forward, rows times tokens of the longest request: 64 MiB, and as long as the host takes otherwise."""

LEAST_FREE = 1 << 30
"""Bytes of a GPU that must be free before the first is captured where nobody asked: decode and rounds are captured later."""


def has_room(device: torch.device) -> bool:
    """Whether all ranks have LEAST_FREE; each of them asks."""
    return device.type != "cuda" or least_of_ranks(free_bytes(device)) >= LEAST_FREE


def longest(size: int, table_width: int) -> int:
    """Tokens of the longest request that the whole graph of `size` rows takes, of as many as a table has room for."""
    return min(table_width, max(MOST_SCORES // size // PAGE_SIZE, 1) * PAGE_SIZE)


class WholePrefills:
    """Of one model: what whole graphs read, and which prefills take them."""

    def __init__(self) -> None:
        self.graphs: dict[Any, EitherGraph] = {}
        """By SGLang's key of a captured size."""
        self.sizes: list[int] = []
        """Which these are, in ascending order, once all are captured."""
        self.seconds, self.taken = 0.0, 0
        self.replayed = False
        self.given_up = False
        self._inputs: BatchInputs | None = None

    def of_rows(self, rows: int, device: torch.device) -> BatchInputs:
        """What the metadata launch of a graph of so many rows reads; padding until `fill` writes it."""
        if self._inputs is None:
            lens, requests = (torch.empty(MOST_ROWS, dtype=torch.int64, device=device) for _ in range(2))
            self._inputs = BatchInputs(lens.fill_(PADDING_LENGTH), requests.fill_(PADDING_SLOT))
        return BatchInputs(self._inputs.seq_lens[:rows], self._inputs.req_pool_indices[:rows])

    def size_for(self, batch: ForwardBatch, table_width: int) -> int | None:
        """The captured size whose whole graph a prefill takes, the least that its rows fit; None where it takes none.

        As in SGLang at least half of a graph's rows are real.
        """
        rows = len(batch.input_ids)
        size = next((size for size in self.sizes if rows <= size <= 2 * rows), None)
        if size is None or batch.forward_mode != ForwardMode.EXTEND or batch.seq_lens_cpu is None:
            return None
        return size if int(batch.seq_lens_cpu.max()) <= longest(size, table_width) else None

    def fill(self, batch: ForwardBatch, padded: int) -> None:
        """Write what the whole graph of `padded` rows reads, without waiting for the GPU."""
        rows = sum(batch.extend_seq_lens_cpu)  # of the batch's inputs SGLang may have padded some
        inputs = self.of_rows(padded, batch.positions.device)
        torch.add(batch.positions[:rows], 1, out=inputs.seq_lens[:rows])
        inputs.seq_lens[rows:] = PADDING_LENGTH
        of_row = torch.repeat_interleave(batch.req_pool_indices, batch.extend_seq_lens, output_size=rows)
        inputs.req_pool_indices[:rows] = of_row
        inputs.req_pool_indices[rows:] = PADDING_SLOT

    def give_up(self, backend: Any) -> None:
        """Leave all sizes to the pieces, in SGLang's `backend` of captured prefills."""
        for key, either in self.graphs.items():
            backend._graphs[key], backend._capture_inputs[key] = either.pieces, either.inputs
        self.graphs.clear()
        self.given_up = True


class EitherGraph:
    """Both graphs of one size, in place of SGLang's. It keeps inputs of the last capture alone: `inputs` are the pieces'."""

    def __init__(self, pieces: Any, whole: Any, inputs: Any):
        self.pieces, self.whole, self.inputs, self.takes_whole = pieces, whole, inputs, False

    def replay(self) -> None:
        (self.whole if self.takes_whole else self.pieces).replay()


_OFFERED: WeakKeyDictionary[torch.nn.Module, WholePrefills] = WeakKeyDictionary()
"""By model of a runner."""
_recorded: list[WholePrefills] = []
"""Whose whole graph is being captured, if one is."""


def recorded() -> WholePrefills | None:
    """Whose whole graph is captured or warmed up now; None outside of that."""
    return _recorded[-1] if _recorded else None


@contextlib.contextmanager
def recording(prefills: WholePrefills) -> Iterator[None]:
    """While a prefill is captured whole."""
    _recorded.append(prefills)
    try:
        yield
    finally:
        _recorded.pop()


class WholeAttention:
    """In place of the forward of a layer's RadixAttention, which leaves the graph in every captured prefill.

    Where ranks divide the KV it returns the log-sum-exp of a rank's part too, as that does.
    """

    def __init__(self, attention: Any):
        self.attention, self.own = attention, attention.forward

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: Any, batch: ForwardBatch, save_kv_cache: bool = True, **mla_args: Any
    ) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if recorded() is None or k is not None:
            return self.own(q, k, v, batch, save_kv_cache, **mla_args)
        return get_attn_backend().forward(q, k, v, self.attention, batch, save_kv_cache, **mla_args)


def offer(model: torch.nn.Module, layers: list[Any]) -> None:
    """Have SGLang's runner capture both graphs of few tokens; before it is built.

    Args:
        model: whose prefills they are.
        layers: all DeepseekV2AttentionMLA of it, which have our front.
    """
    _OFFERED[model] = WholePrefills()
    for layer in layers:
        attention = layer.attn_mqa_for_dcp_decode if layer.dcp_size > 1 else layer.attn_mqa
        attention.forward = WholeAttention(attention)
    hook(f"{RUNNER}.capture", _capture, HookType.AROUND)
    hook(f"{RUNNER}.capture_one_shape", _capture_size, HookType.AROUND)
    hook(f"{RUNNER}._run_forward", _run, HookType.AROUND)
    hook(f"{RUNNER}.load_batch", _load, HookType.AROUND)
    hook(f"{RUNNER}._prepare_forward_metadata_for_replay", _before_replay, HookType.AROUND)


def _capture(original: Callable, runner: Any) -> None:
    """Around what captures all sizes.

    Raises:
        ValueError: no size has a whole graph, and they were asked for; says what to change.
    """
    original(runner)
    prefills = _OFFERED.get(runner.model_runner.model)
    if prefills is None:
        return
    if not prefills.graphs:
        if switched_on(SWITCH):
            raise ValueError(
                f"{SWITCH}=1 and no captured prefill has up to {MOST_ROWS} tokens: pass a smaller --cuda-graph-bs-prefill, "
                "or unset it"
            )
        return
    prefills.sizes = sorted(key.size for key in prefills.graphs)
    logger.info(
        "nsa_backend: captured prefills of %s tokens whole, the largest of requests within %d, in %.1f s, %.0f MiB",
        prefills.sizes,
        longest(prefills.sizes[-1], _table_width(runner)),
        prefills.seconds,
        prefills.taken / MIB,
    )


def _table_width(runner: Any) -> int:
    return runner.model_runner.attn_backend.config.attention.table_width


def _capture_size(original: Callable, runner: Any, size: int, **options: Any) -> None:
    """Around what captures the graphs of one size. Where a layer leaves the graph that was to be whole, pieces serve all sizes.

    Raises:
        ValueError: one does, and whole graphs were asked for.
    """
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    original(runner, size, **options)
    prefills, backend = _OFFERED.get(runner.model_runner.model), runner.model_runner.attn_backend
    if prefills is None or prefills.given_up or any(options.values()):
        return
    if size not in whole_sizes(runner.capture_num_tokens):
        return
    device = backend.config.attention.device
    if not (prefills.graphs or switched_on(SWITCH) or has_room(device)):
        logger.warning("nsa_backend: short prefills are in pieces, because less than %d MiB are free", LEAST_FREE / MIB)
        prefills.give_up(runner.backend)
        return
    began, free = time.perf_counter(), free_bytes(device)
    backend.keep_rows(longest(size, _table_width(runner)), prefills.of_rows(size, device))
    key, graphs = ShapeKey(size=size), runner.backend._graphs
    pieces, inputs = graphs[key], runner.backend._capture_inputs[key]
    try:
        with recording(prefills):
            original(runner, size)
    except Exception:
        logger.error("nsa_backend: a prefill of %d tokens cannot be captured in one graph: %s=0 leaves that out", size, SWITCH)
        raise
    whole = graphs[key]
    prefills.graphs[key] = graphs[key] = EitherGraph(pieces, whole, inputs)
    if left := len(whole._segments) - 1:
        if switched_on(SWITCH):
            raise ValueError(f"{SWITCH}=1 and a prefill of {size} tokens leaves its graph {left} times: unset it")
        logger.warning("nsa_backend: short prefills are in pieces, because one of %d tokens left its graph", size)
        prefills.give_up(runner.backend)
    prefills.seconds += time.perf_counter() - began
    prefills.taken += free - free_bytes(device)


def _whole_size(prefills: WholePrefills, runner: Any, batch: ForwardBatch) -> int | None:
    """`WholePrefills.size_for`, but None where a cache still brings KV from elsewhere.

    Layers in pieces wait for their own KV each, and what comes for the later ones comes meanwhile.
    """
    counter = runner.model_runner.token_to_kv_pool.layer_transfer_counter
    # SGLang asks of a counter `set_consumer` and `wait_until` alone; those of its own caches have -1 where nothing comes.
    if counter is not None and getattr(counter, "consumer_index", 0) >= 0:
        return None
    return prefills.size_for(batch, _table_width(runner))


def _run(original: Callable, runner: Any, batch: ForwardBatch, num_tokens: int) -> Any:
    """Around a forward that is warmed up or captured: the head of a whole one writes its metadata."""
    if recorded() is _OFFERED.get(runner.model_runner.model) is not None:
        runner.model_runner.attn_backend.at_head_of_rows(num_tokens)
    return original(runner, batch, num_tokens)


def _load(original: Callable, runner: Any, batch: ForwardBatch, **options: Any) -> Any:
    """Around what pads a prefill to a captured size: one that takes a whole graph to a size that has one."""
    prefills = _OFFERED.get(runner.model_runner.model)
    if prefills is None or _whole_size(prefills, runner, batch) is None:
        return original(runner, batch, **options)
    captured, runner.capture_num_tokens = runner.capture_num_tokens, prefills.sizes
    try:
        return original(runner, batch, **options)
    finally:
        runner.capture_num_tokens = captured


def _before_replay(original: Callable, runner: Any, batch: ForwardBatch, static: ForwardBatch, key: Any) -> Any:
    """Around what makes metadata for a replay; a whole graph makes its own, of what it is given here."""
    of_runner = runner.model_runner
    prefills, backend = _OFFERED.get(of_runner.model), of_runner.attn_backend
    graph = None if prefills is None else prefills.graphs.get(key)
    if graph is not None:
        graph.takes_whole = _whole_size(prefills, runner, batch) == key.size
    if graph is None or not graph.takes_whole:
        return original(runner, batch, static, key)
    prefills.fill(batch, key.size)
    backend.replay_rows(key.size)
    if not prefills.replayed:
        logger.info("nsa_backend: a prefill ran in one graph, the first of %d tokens", key.size)
    prefills.replayed = True
    return backend.resolve_prefill_shared_read_ends(batch, num_qo_tokens=key.size, build_snapshot=True)
