"""DP attention: what its ranks have alike in a round, and which of a rank's rounds can be one graph.

Ranks meet in collectives, and all of these are inside SGLang's three graphs; between them only the ranks of attention TP speak,
which have the same batch. All agree on what is captured (`least_of_ranks`). A round of one graph has the same three as child
nodes, in the same order, so a rank that replays one and a rank that replays three meet in the same collectives, as long as both
take graphs of the same sizes. SGLang's ranks settle these before every round: they tell one another how many requests they
have, and whether all can replay graphs (`MLPSyncBatchInfo`); the largest number decides the size of every graph of every rank.
So each rank chooses for itself between one graph and three, and nothing more has to be told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.rounds.by_release import graphs_of, release
from nsa_backend.kernels.round_tensors import RoundInputs

OF_A_BATCH = (
    "global_num_tokens",
    "global_num_tokens_for_logprob",
    "draft_global_num_tokens",
    "draft_global_num_tokens_for_logprob",
)
"""Of a ScheduleBatch: requests of every rank, in a round of drafts; of the drafts' own where their experts are elsewhere."""


def least_of_ranks(value: int) -> int:
    """The least over all ranks that run forwards together: every one of them calls this, once for each value."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return value
    least = torch.tensor(value)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)


def gather(worker: Any) -> bool:
    """Whether the sizes of the worker's graphs go by the rank with the most requests."""
    return all(runner.require_mlp_tp_gather for runner in graphs_of(worker) if runner is not None)


def most_requests(batch: Any) -> int:
    """Requests of the rank that has most; those of the batch where there are no such ranks."""
    return len(batch.seq_lens) if batch.global_num_tokens is None else max(batch.global_num_tokens)


def ranks_problem(batch: Any, worker: Any) -> str | None:
    """Why what the ranks told one another leaves this batch to SGLang's own path, or None.

    Args:
        batch: SGLang's ScheduleBatch.
        worker: SGLang's, which has captured the graphs of a round.
    """
    told, gathers = batch.global_num_tokens is not None, gather(worker)
    if told != gathers:
        return (
            "its ranks say how much they have, and graphs do not go by it"
            if told
            else "its ranks do not say how much they have"
        )
    if told and not (batch.can_run_decode_cuda_graph and batch.can_run_dp_draft_cuda_graph):
        return "a rank can replay no graph"
    return None


def is_idle_round(batch: Any) -> bool:
    """Whether other ranks have a round and this one has no request in it; their prefills are no round."""
    return batch.forward_mode.is_idle() and not batch.is_extend_in_batch and batch.global_num_tokens is not None


def among_equals(batch: Any, requests: int) -> None:
    """Let SGLang take this batch for one of ranks that have `requests` each, so that its graphs are of that size."""
    if batch.global_num_tokens is None:
        return
    for name in OF_A_BATCH:
        counts = getattr(batch, name)
        if counts is not None:
            setattr(batch, name, [requests] * len(counts))


@contextlib.contextmanager
def without_copies_from_host(inputs: RoundInputs) -> Iterator[None]:
    """While a round runs on static tensors: nothing that SGLang counts on the host is copied to the GPU.

    SGLang copies counts from memory that it then gives back, and a graph would go on reading there. What the ranks have is read
    by its graphs in buffers of their own. How many rows are no padding, by which experts leave padding out, differs from replay
    to replay, so it comes from `inputs.num_requests`.
    """
    if not release().has_ranks:  # nor experts in parallel
        yield
        return
    with (
        _around(ForwardBatch, "init_mlp_sync_metadata", _ranks_on_host),
        _around(ForwardBatch, "_init_num_token_non_padded", partial(_rows_on_gpu, inputs.num_requests)),
        _around(DecodeCudaGraphRunner, "_set_dp_real_num_tokens", partial(_rows_of_rank_on_gpu, inputs)),
    ):
        yield


@contextlib.contextmanager
def _around(owner: type, method: str, function: Callable) -> Iterator[None]:
    original = getattr(owner, method)
    setattr(owner, method, lambda *args, **options: function(original, *args, **options))
    try:
        yield
    finally:
        setattr(owner, method, original)


def _ranks_on_host(original: Callable, forward_batch: Any, batch: Any, device: Any, **options: Any) -> None:
    """Around `ForwardBatch.init_mlp_sync_metadata`; a forward outside graphs, which reads the copies, cannot be captured."""
    original(forward_batch, batch, "cpu", **options)


def _rows_on_gpu(num_requests: torch.Tensor, original: Callable, forward_batch: Any, *, device: Any, **options: Any) -> None:
    """Around `ForwardBatch._init_num_token_non_padded`, which sets one count for the host and one, if wanted, for experts."""
    original(forward_batch, device="cpu", **options)
    if forward_batch.global_num_token_non_padded is not None:
        width = forward_batch.global_num_token_non_padded_cpu // forward_batch.batch_size
        forward_batch.global_num_token_non_padded = num_requests[0] * width


def _rows_of_rank_on_gpu(inputs: RoundInputs, original: Callable, runner: Any, rows: int) -> None:
    """Around `DecodeCudaGraphRunner._set_dp_real_num_tokens`."""
    original(runner, inputs.num_requests[0] * (rows // len(inputs.seq_lens)))
