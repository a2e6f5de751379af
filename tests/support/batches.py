"""Batches as SGLang hands them over, eager and captured, and what their metadata must be; for every supported release."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from metadata_fields import check_fields
from metadata_reference import Batch

from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.testing import captured
from nsa_backend.testing.calls import calls

MODES = captured.MODES
"""The paged modes of the installed release, by their names in `metadata_reference`."""


def random_batch(runner: Any, mode: str, requests: int, seed: int, num_steps: int) -> Batch:
    rng = np.random.default_rng(seed)
    table = runner.req_to_token_pool.req_to_token
    d = num_steps + 1
    extend = rng.integers(1, d + 1, requests)
    return Batch(
        mode=mode,
        seq_lens=(rng.integers(1, 500, requests) + {"draft_extend_v1": extend, "draft_extend_v2": d}.get(mode, 0)).tolist(),
        slots=(1 + rng.permutation(table.shape[0] - 1)[:requests]).tolist(),
        req_to_token=table.numpy(),
        index_topk=runner.model_config.hf_config.index_topk,
        num_sms=0,
        num_steps=num_steps,
        num_draft_tokens=d,
        extend_lens=extend.tolist() if mode == "draft_extend_v1" else [],
    )


def forward_batch(batch: Batch, mode: ForwardMode, *, lengths_on_host: bool = True) -> ForwardBatch:
    """As SGLang hands an eager batch over."""
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int64)
    requests = len(lengths)
    extend = batch.extend_lens or [batch.num_draft_tokens] * requests
    return ForwardBatch(
        forward_mode=mode,
        batch_size=requests,
        input_ids=None,
        req_pool_indices=torch.tensor(batch.slots, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone() if lengths_on_host else None,
        seq_lens_sum=int(lengths.sum()) if lengths_on_host else None,
        out_cache_loc=torch.arange(requests * batch.num_steps),
        extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
        extend_seq_lens_cpu=extend,
    )


def prefill_batch(runner: Any, prefix: list[int], new: list[int], seed: int = 0) -> ForwardBatch:
    """A prefill of `new` tokens of each request behind `prefix` cached ones, in random rows of the request pool."""
    lengths = [a + b for a, b in zip(prefix, new, strict=True)]
    slots = (1 + np.random.default_rng(seed).permutation(290)[: len(new)]).tolist()
    table = runner.req_to_token_pool.req_to_token.numpy()
    batch = forward_batch(Batch("decode", lengths, slots, table, 64, 0), ForwardMode.EXTEND)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new), new
    batch.extend_prefix_lens_cpu = prefix
    batch.input_ids, batch.out_cache_loc = torch.zeros(sum(new), dtype=torch.long), torch.arange(sum(new))
    return batch


def static_batch(requests: int, rows: int, mode: ForwardMode) -> ForwardBatch:
    """The graph runner's own buffers, as full of padding as when it captures."""
    ones, zeros = torch.ones(requests, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64)
    fields = vars(captured.static_batch(ones, zeros, rows // requests)) | {"forward_mode": mode}
    locations, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(**fields, input_ids=None, out_cache_loc=locations, positions=positions)


def fill(static: ForwardBatch, batch: Batch) -> None:
    static.seq_lens.copy_(torch.tensor(batch.seq_lens))
    static.req_pool_indices.copy_(torch.tensor(batch.slots))
    if batch.extend_lens:
        static.spec_info.num_accept_tokens.copy_(torch.tensor(batch.extend_lens))


def begin_forward(backend: Any, static: ForwardBatch, layers: tuple[int, ...] = (0,)) -> list:
    """What a captured forward does before any attention: the head of the graph, then each layer asks for its metadata.

    Returns:
        what every layer got.
    """
    calls.at_graph_head(backend, static)
    return [backend.get_indexer_metadata(layer, None) for layer in layers]


def begin_round(multi_step: Any, batch: ForwardBatch, *, captured: bool = True) -> None:
    """What a draft round does first: SGLang's call inside a graph, or the plugin's hook of `draft_forward`."""
    if captured:
        calls.at_round_head(multi_step, batch)
    if not hasattr(multi_step, "init_forward_metadata_in_graph"):
        multi_step.begin_draft_round(batch)


def replayed_round(multi_step: Any, batch: Batch) -> ForwardBatch:
    """Capture a draft round on static tensors, then replay it with `batch`: nothing but the recorded launch writes.

    Returns:
        the static batch.
    """
    requests = len(batch.seq_lens)
    multi_step.init_cuda_graph_state(requests + 2, requests + 2)
    static = static_batch(requests, requests, ForwardMode.DECODE)
    static.out_cache_loc = torch.zeros(requests * batch.num_steps, dtype=torch.int64)
    calls.before_round_capture(multi_step, static)
    recorded = multi_step.captured.current
    begin_round(multi_step, static)
    fill(static, batch)
    calls.before_round_replay(multi_step, static)
    multi_step.writer.write(recorded.plan, recorded.buffers, recorded.inputs)
    return static


def check(metadata: Any, batch: Batch, step: int = 0) -> None:
    """Every field of one step against plain Python."""
    check_fields(metadata, batch, step)
    rows, requests = len(metadata.nsa_seqlens_expanded), len(batch.seq_lens)
    ends = np.cumsum([0, *(batch.extend_lens or [rows // requests] * requests)])
    ends[-1] = rows
    np.testing.assert_array_equal(metadata.cu_seqlens_q.numpy(), ends)
    owners = np.repeat(np.arange(requests), np.diff(ends))
    np.testing.assert_array_equal(metadata.token_to_batch_idx.numpy(), owners)
    np.testing.assert_array_equal(metadata.nsa_cu_seqlens_q.numpy(), np.arange(rows + 1))
    assert sum(metadata.nsa_extend_seq_lens_list) == rows
