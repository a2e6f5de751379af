"""DP attention: what its ranks have alike in a round, and which of a rank's rounds can be one graph.

Ranks meet in collectives, and all of these are inside SGLang's three graphs; between them only the ranks of attention TP speak,
which have the same batch and decide alike (`least_of_batch`). A round of one graph has the same three as child
nodes, in the same order, so a rank that replays one and a rank that replays three meet in the same collectives, as long as both
take graphs of the same sizes. SGLang's ranks settle these before every round: they tell one another how many requests they
have, and whether all can replay graphs (`MLPSyncBatchInfo`); the largest number decides the size of every graph of every rank.
So each rank chooses for itself between one graph and three, and nothing more has to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.rounds.release import graphs_of

COUNTS = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_mlp_sync_metadata"
OF_A_BATCH = (
    "global_num_tokens",
    "global_num_tokens_for_logprob",
    "draft_global_num_tokens",
    "draft_global_num_tokens_for_logprob",
)
"""Of a ScheduleBatch: requests of every rank, in a round of drafts; of the drafts' own where their experts are elsewhere."""


def least_of_batch(value: int) -> int:
    """The least over the ranks that share a batch, those of attention TP: every one of them calls this, once for each value.

    Under DP attention other ranks have batches of their own, and capture in other rounds.
    """
    group = get_parallel().attn_tp_group
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


def counts_on_host(original: Callable, forward_batch: Any, batch: Any, device: Any, **options: Any) -> None:
    """Around `ForwardBatch.init_mlp_sync_metadata` while a round is captured: the ranks' counts are not copied to the GPU.

    SGLang copies them from memory that it then gives back, and a graph would go on reading there. Its graphs read buffers of
    their own; a forward outside them, which reads the copies, cannot be captured with tensors of the host.
    """
    original(forward_batch, batch, "cpu", **options)
