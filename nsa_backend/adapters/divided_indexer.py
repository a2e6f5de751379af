"""The indexer's work of long prefills, divided among the ranks of tensor parallel.

The indexer is whole on every rank: under tensor parallel 8 eight GPUs make the same queries of all new tokens, score the same
keys and select the same tokens. Here rank r of n does so for rows r, r + n, ..., which are as long as the other ranks' on
average, and ranks tell one another what they have selected: 8 KB a row. Keys are whole on every rank as before, and so are the
gates of heads, whose product rounds by its number of rows.

What is selected is what every rank would have selected by itself, as a row's scores depend on no other row, and products of
block-FP8 weights do not; one of bfloat16 may round by its number of rows, and ties then fall otherwise. It happens where
SGLang runs the indexer of a prefill from the host, eager or in pieces; prefills in one graph are too short for it.

Unasked DeepSeek-V3.2 has it on Hopper, as it has run: without DP attention, and in no batch with requests that decode.
GLM-5's queries come from another kernel, with interleaved RoPE, and are divided where the user asks for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_backend.adapters.core import CapturedForwards
from nsa_backend.adapters.option_rules import Rule
from nsa_backend.adapters.sglang_types import ForwardBatch, HookType
from nsa_backend.adapters.shared import hook, is_hooked
from nsa_backend.adapters.startup import attention_tp_size_of
from nsa_backend.environment import asked
from nsa_backend.releases import divided_indexer_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_DIVIDED_INDEXER"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
SELECTION = f"{INDEXER}._get_topk_ragged"

LEAST_ROWS = 1024
"""New tokens of a batch: with fewer the host takes as long as the GPU."""
LEAST_LENGTH = 2048
"""Keys of a row, on average: with fewer the exchange takes as long as the scores."""

NEEDED = (
    Rule("attn_cp_size", "--attn-cp-size", "", (None, 1), "drop --enable-prefill-cp or --attn-cp-size", everywhere=False),
    Rule("dcp_size", "--dcp-size", "", (None, 1), "drop --dcp-size", everywhere=False),
    Rule("enable_two_batch_overlap", "--enable-two-batch-overlap", "", advice="drop --enable-two-batch-overlap"),
    Rule("enable_lora", "--enable-lora", "", advice="drop --enable-lora"),
)
"""Options under whose values the ranks of attention have the same rows, in one sequence of launches."""


UNTRIED = Rule("enable_mixed_chunk", "--enable-mixed-chunk", "")
"""Under whose other values ranks divide it where they are asked to: SGLang runs such a batch as a prefill."""


def divided_problems(args: Any) -> list[str]:
    """One sentence for each reason why ranks of a server of these resolved arguments cannot divide the indexer's work."""
    problem = divided_indexer_problem()
    if problem is not None:
        return [problem]
    found = [f"{rule.option} leaves every rank the whole indexer: {rule.advice}" for rule in NEEDED if not rule.serves(args)]
    if attention_tp_size_of(args) == 1:
        found.append("ranks of tensor parallel divide the indexer's work, and attention has one here: unset it")
    backends = {own or args.attention_backend for own in (args.prefill_attention_backend, args.decode_attention_backend)}
    if len(backends) > 1:
        found.append(f"prefill and decode have backends of two names, {' and '.join(sorted(backends))}: name one for both")
    return found


def wanted(args: Any, device_sm: int) -> bool:
    """Whether ranks of a server of these resolved arguments are to divide it; see above."""
    said = asked(SWITCH)
    if said is not None:
        return said
    if device_sm != 90 or attention_tp_size_of(args) != args.tp_size or not UNTRIED.serves(args):
        return False
    return not divided_problems(args)


def divides(*, fused: bool) -> bool:
    """Whether the indexers of this process divide their work, or those that are GLM-5's."""
    return is_hooked(SELECTION) and (not fused or bool(asked(SWITCH)))


def divide() -> None:
    """Have the indexers of this process divide their work; once a process."""
    hook(f"{INDEXER}._get_q_k_bf16", _query_and_key, HookType.AROUND)
    hook(f"{INDEXER}._get_logits_head_gate", _gates, HookType.AROUND)
    if asked(SWITCH):
        hook(f"{INDEXER}._fused_q_prepare_and_store", _fused, HookType.AROUND)
    hook(SELECTION, _selection, HookType.AROUND)


def ranks() -> Any:
    """SGLang's group of the ranks that share the heads of a request's attention."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_group


def rows_of_rank(batch: ForwardBatch) -> slice | None:
    """Of the new tokens of `batch`, those whose queries this rank makes; None where it makes all.

    Every rank of attention gives the same answer: it depends on lengths on the host, which they have alike.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend

    group = ranks()
    divided = group.world_size > 1 and batch.forward_mode.is_extend_without_speculative() and batch.seq_lens_cpu is not None
    if not divided or not isinstance(get_attn_backend(), CapturedForwards):
        return None
    if not worth_it(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu):
        return None
    return slice(group.rank_in_group, sum(map(int, batch.extend_seq_lens_cpu)), group.world_size)


def worth_it(before: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a batch of requests with so many tokens before, and so many new ones, has enough rows, and long enough ones."""
    rows = sum(map(int, new))
    keys = sum(int(n) * int(prefix) + int(n) * (int(n) + 1) // 2 for prefix, n in zip(before, new, strict=True))
    return rows >= LEAST_ROWS and keys >= LEAST_LENGTH * rows


def query_of(indexer: Any, q_lora: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim], as projected."""
    return indexer.wq_b(q_lora[rows].contiguous())[0].view(-1, indexer.n_heads, indexer.head_dim)


def _query_and_key(
    original: Callable,
    indexer: Any,
    q_lora: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    enable_dual_stream: bool,
    forward_batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Around what projects x [tokens, hidden] and rotates: queries [rows of the rank, heads, dim], and all keys."""
    rows = None if indexer.use_dsa_indexer_fusion else rows_of_rank(forward_batch)
    if rows is None:
        return original(indexer, q_lora, x, positions, enable_dual_stream, forward_batch)
    query = query_of(indexer, q_lora, rows)
    rotated = query[..., : indexer.rope_head_dim]
    no_key = rotated.new_empty(len(query), indexer.rope_head_dim)
    found, _ = indexer.rotary_emb(positions[rows].contiguous(), rotated, no_key)
    indexer._update_rope_guarded(rotated, found)
    return indexer._maybe_rotate(query), indexer._get_k_bf16(x, positions), None


def _gates(original: Callable, indexer: Any, x: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
    """Around what weighs the heads of all tokens x, by the scales of their queries [rows, heads, 1]: of the rank's alone."""
    rows = len(q_scale)
    if isinstance(x, tuple) or rows == len(x):
        return original(indexer, x, q_scale)
    gates = indexer._weights_proj_bf16_in_fp32_out(x)[every_nth(rows)] * indexer.n_heads**-0.5
    return gates.unsqueeze(-1) * q_scale * indexer.softmax_scale  # in its order, and with nothing to compile


def every_nth(rows: int) -> slice:
    """So many rows of this rank, of any number of tokens."""
    first, step = ranks().rank_in_group, ranks().world_size
    return slice(first, first + step * (rows - 1) + 1, step)


def _fused(
    original: Callable,
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    act_quant: Callable,
    *,
    num_tokens: int | None = None,
    enable_dual_stream: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Around the form of both that GLM-5 has, which stores all keys: queries in 8 bits and gates, of the rank's rows."""
    rows = rows_of_rank(forward_batch)
    if rows is None:
        options = {"num_tokens": num_tokens, "enable_dual_stream": enable_dual_stream}
        return original(indexer, x, q_lora, positions, forward_batch, layer_id, act_quant, **options)
    gates = store_fused(indexer, x, positions, forward_batch, layer_id, slice(num_tokens), act_quant)
    return score_fused(indexer, q_lora, gates, positions, rows)


def store_fused(
    indexer: Any,
    x: torch.Tensor,
    positions: torch.Tensor,
    batch: ForwardBatch,
    layer_id: int,
    tokens: slice,
    act_quant: Callable,
) -> torch.Tensor:
    """Write the index keys of these tokens of x [rows, hidden], as GLM-5's indexers do; gates of all rows."""
    key, gates = indexer._fused_k_weights(x)
    slots = batch.out_cache_loc[tokens]
    indexer._fused_k_prepare_and_store(key[tokens], positions[tokens], batch, layer_id, act_quant, out_cache_loc=slots)
    return gates


def score_fused(
    indexer: Any, q_lora: torch.Tensor, gates: torch.Tensor, positions: torch.Tensor, rows: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of these rows in 8 bits, and their gates, as GLM-5's indexers make them."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    of_rows = positions[rows].contiguous()  # long before the last launch, which begins early and reads them before it waits
    return dsa_indexer.fused_q_indexer_rope_first_quant(
        query_of(indexer, q_lora, rows).contiguous(),
        gates[rows].contiguous(),
        indexer.softmax_scale * indexer.n_heads**-0.5,
        indexer._indexer_cos_sin_cache,
        of_rows,
    )


def _selection(
    original: Callable,
    indexer: Any,
    enable_dual_stream: bool,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around what scores and selects for queries and gates of the rank's rows: int32 [tokens, topk] of all, -1 in padding."""
    from sglang.srt.runtime_context import get_flags

    rows = None if metadata.is_part else rows_of_rank(forward_batch)
    if rows is None or len(q_fp8) >= rows.stop:  # all queries were made here
        return original(indexer, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result)
    own = original(indexer, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata.of_rows(rows))
    if topk_result is None:
        topk_result = own.new_full((len(forward_batch.positions), own.shape[1]), -1)
    gather(own, topk_result[: rows.stop])
    if not get_flags().dp.capturing_prefill_graph:
        tell(rows.step)
    return topk_result


@functools.cache
def tell(ranks: int) -> None:
    """The log has it once, of a prefill that is served."""
    logger.info("nsa_backend: %d ranks divide the indexer's work of long prefills", ranks)


def gather(own: torch.Tensor, out: torch.Tensor) -> None:
    """Write what all ranks have of `out` [rows, topk] into it: `own` [rows of the rank, topk] are every n-th of its rows."""
    group, (rows, topk) = ranks(), out.shape
    most, whole, left = -(-rows // group.world_size), rows // group.world_size, rows % group.world_size
    sent = own if len(own) == most else torch.nn.functional.pad(own, (0, 0, 0, most - len(own)))
    found = own.new_empty(group.world_size, most, topk)
    if group.pynccl_comm is None:
        group.all_gather_into_tensor(found.flatten(0, 1), sent)
    else:  # on the stream of the others; torch's would watch events while the next piece is captured
        with group.pynccl_comm.change_state(enable=True):
            group.pynccl_comm.all_gather(found.flatten(0, 1), sent)
    out[: whole * group.world_size].unflatten(0, (whole, group.world_size)).copy_(found[:, :whole].transpose(0, 1))
    out[rows - left :] = found[:left, whole:].flatten(0, 1)
