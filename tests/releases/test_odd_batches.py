"""A scheduler's life in fast motion: requests join, end between draft and verify, are retracted, and their slots reused.

Draft, verify and draft-extend are captured once and replayed for every round, padded to the captured sizes, on static tensors
that keep what the last round left; after each replay every field is compared with the plain-Python reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import MODES, begin_round, check, fill, forward_batch, static_batch
from metadata_reference import Batch

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

SIZES, ROUNDS = (1, 2, 4, 8), 40
N = 3
D = N + 1


class Graph:
    """One captured mode and size: the runner's static tensors, and what its replay runs."""

    def __init__(self, mode: str, backend, bs: int):
        self.mode, self.backend, self.bs = mode, backend, bs
        self.of_a_round = mode == "draft_decode"
        self.static = static_batch(bs, bs if self.of_a_round else bs * D, MODES.get(mode, ForwardMode.DECODE))
        (calls.before_round_capture if self.of_a_round else calls.before_capture)(backend, self.static)
        self.recorded = backend.captured.current

    def replay(self, batch: Batch) -> list:
        """Fill the real requests and the padding as SGLang does, replay, and return the metadata of every step."""
        fill(self.static, batch)
        (calls.before_round_replay if self.of_a_round else calls.before_replay)(self.backend, self.static)
        self.backend.writer.write(self.recorded.plan, self.recorded.buffers, self.recorded.inputs)
        # Step backends hold the views of the size captured last; the graph of this size wrote its own.
        return list(self.recorded.steps) if self.of_a_round else [self.backend.forward_metadata]


class World:
    """Requests with a slot and a length each; a slot's table row is rewritten whenever it changes hands."""

    def __init__(self, runner, seed: int):
        self.rng = np.random.default_rng(seed)
        self.table = runner.req_to_token_pool.req_to_token
        self.width = self.table.shape[1]
        self.lengths: dict[int, int] = {}

    def admit(self) -> None:
        free = [s for s in range(1, self.table.shape[0]) if s not in self.lengths]
        slot = int(self.rng.choice(free[:3]))  # the slots given back last are reused first
        limit = self.width - D
        length = int(self.rng.choice([1, 2, 63, 64, 65, limit, self.rng.integers(1, limit)]))
        self.table[slot] = torch.from_numpy(self.rng.integers(0, 2**20, self.width).astype(np.int32))
        self.lengths[slot] = length

    def leave(self, slot: int) -> None:
        """Finished, aborted or retracted: whoever gets the pages next writes other slots there."""
        del self.lengths[slot]
        self.table[slot] = torch.from_numpy(self.rng.integers(0, 2**20, self.width).astype(np.int32))

    def batch(self, runner, mode: str, bs: int, lengths: dict[int, int], extend: list[int] | None = None) -> Batch:
        """The batch with the padding that SGLang adds: slot 0, length 1, one accepted token."""
        padding = bs - len(lengths)
        counts = [*extend, *[1] * padding] if extend else []
        return Batch(
            mode=mode,
            seq_lens=[*lengths.values(), *[1] * padding],
            slots=[*lengths, *[0] * padding],
            req_to_token=self.table.numpy(),
            index_topk=runner.model_config.hf_config.index_topk,
            num_sms=0,
            num_steps=N,
            num_draft_tokens=D,
            extend_lens=counts,
            tail_rows=bs * D - sum(counts) if counts else 0,
        )


@pytest.mark.parametrize("extend_mode", [mode for mode in MODES if mode.startswith("draft_extend")])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_rounds_of_a_busy_server(make_runner, extend_mode, seed):
    runner = make_runner(num_steps=N, table_width=300, pool_size=20)
    draft = NativeSparseAttnMultiStepBackend(runner, 1, N)
    draft.init_cuda_graph_state(max(SIZES), max(SIZES))
    target, extend = create_backend(runner), create_backend(runner)
    for backend in (target, extend):
        backend.init_cuda_graph_state(max(SIZES), max(SIZES) * D)
    backends = {"draft_decode": draft, "target_verify": target, extend_mode: extend}
    graphs = {(mode, bs): Graph(mode, backend, bs) for mode, backend in backends.items() for bs in reversed(SIZES)}
    world = World(runner, seed)
    rng = world.rng

    def run(mode: str, lengths: dict[int, int], counts: list[int] | None = None) -> None:
        bs = next(size for size in SIZES if size >= len(lengths))
        batch = world.batch(runner, mode, bs, lengths, counts)
        for step, metadata in enumerate(graphs[mode, bs].replay(batch)):
            check(metadata, batch, step)

    for _ in range(ROUNDS):
        while len(world.lengths) < rng.integers(1, max(SIZES) + 1):
            world.admit()
        run("draft_decode", world.lengths)
        while len(world.lengths) > 1 and rng.random() < 0.3:  # a request ends between draft and verify
            world.leave(int(rng.choice(list(world.lengths))))
        run("target_verify", world.lengths)
        counts = [int(rng.choice([1, D, rng.integers(1, D + 1)])) for _ in world.lengths]
        if extend_mode == "draft_extend_v2":
            run(extend_mode, {s: length + D for s, length in world.lengths.items()})
        else:
            pairs = zip(world.lengths.items(), counts, strict=True)
            run(extend_mode, {s: length + a for (s, length), a in pairs}, counts)
        for (slot, length), accepted in zip(list(world.lengths.items()), counts, strict=True):
            world.lengths[slot] = length + accepted
            if world.lengths[slot] > world.width - D or rng.random() < 0.1:  # at the limit, finished, or retracted
                world.leave(slot)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_a_batch_of_nobody(make_runner, mode):
    """An idle rank of DP attention runs eager batches without a request."""
    backend = create_backend(make_runner())
    batch = forward_batch(Batch("decode", [], [], backend.writer.req_to_token.numpy(), 64, 0), mode)
    batch.extend_seq_lens_cpu = []
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    assert metadata.cache_seqlens_int32.shape == metadata.nsa_seqlens_expanded.shape == (0,)
    assert metadata.nsa_cu_seqlens_k.shape == metadata.cu_seqlens_k.shape == (1,)
    assert sum(metadata.nsa_extend_seq_lens_list) == 0


def test_a_draft_round_of_nobody(make_runner):
    multi_step = NativeSparseAttnMultiStepBackend(make_runner(num_steps=N), 1, N)
    empty = Batch("draft_decode", [], [], multi_step.writer.req_to_token.numpy(), 64, 0)
    batch = forward_batch(empty, ForwardMode.DECODE)
    batch.out_cache_loc = torch.zeros(0, dtype=torch.int64)
    multi_step.init_forward_metadata(batch)
    begin_round(multi_step, batch, captured=False)
    assert [b.forward_metadata.cache_seqlens_int32.shape[0] for b in multi_step.attn_backends] == [0] * (N - 1)


@pytest.mark.parametrize("mode", ["draft_decode", "target_verify"])
def test_a_request_at_the_context_limit_is_clipped(make_runner, mode):
    """L + N reaches past the table: lengths stop at its end and nothing beyond it is read."""
    runner = make_runner(num_steps=N, table_width=128, pool_size=4)
    lengths = [128, 127, 126, 1]
    table = runner.req_to_token_pool.req_to_token.numpy()
    batch = Batch(mode, lengths, [1, 2, 3, 4], table, 64, 0, num_steps=N, num_draft_tokens=D)
    if mode == "target_verify":
        backend = create_backend(runner)
        backend.init_forward_metadata(forward_batch(batch, ForwardMode.TARGET_VERIFY))
        found = [backend.forward_metadata]
    else:
        multi_step = NativeSparseAttnMultiStepBackend(runner, 1, N)
        multi_step.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
        found = [b.forward_metadata for b in multi_step.attn_backends]
    for step, metadata in enumerate(found):
        assert int(metadata.nsa_seqlens_expanded.max()) == int(metadata.cache_seqlens_int32.max()) == 128
        check(metadata, batch, step)
