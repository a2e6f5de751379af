"""A round of real servers by part: kernel time and launches, how long the GPU is idle, how long the host launches graphs.

Pure functions over the events of a trace. A round lasts from the begin of its largest graph on the GPU to that of the next one,
so that nothing between two rounds is lost. Kernels overlap, so the parts may add up to more than a round takes. A kernel
between ranks runs from when its own rank comes to it until the last one has: what they wait for one another counts as its."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import pairwise, takewhile

from nsa_backend.benchmarks.reports.traces import (
    ON_DEVICE,
    Replay,
    along,
    graph_launches,
    host_calls,
    ops,
    round_launches,
    round_marks,
)

ALL_REDUCE, EXCHANGE = "all-reduce", "exchange"

PARTS = {
    ALL_REDUCE: r"AllReduce|all_?reduce|cross_device_reduce",
    EXCHANGE: r"\bnccl\w*Kernel|_dcp_(pack|lse)_|_correct_attn_cp_out|page_table_dcp|local_slots_kernel|partial_lse_kernel",
    "metadata": r"metadata|topk_plan|^prefill_kernel",
    "attention": r"FlashAttnFwd|flash_fwd|prepare_varlen_num_blocks|sparse_attn_fwd|splitkv_mla|^attend\b|attend_kernel"
    r"|^join_kernel",
    "logits": r"mqa_logits",
    "top-k": r"topk_(small|main|persistent|ragged|cluster|paged|slots|transform)|TopKPaged|top_k_per_row|persistent_topk",
    "MoE": r"fused_moe|act_and_mul|silu_mul|moe_|_moe|deepseek_v3_topk|grouped_topk|count_and_sort|tiny_n_gemm|router_gemm"
    r"|^gate_up_(kernel|rows)|^down_(kernel|rows_kernel|blocks)|^choice_sums_kernel|^activate_kernel|^order_kernel"
    r"|^whole_experts|^(gate_up|down|router)\b|^_router_",
    "quantisation": r"group_quant|act_quant|per_token_quant|fp8_quant|^quantise_kernel",
    "indexer": r"hadamard|indexer|triton_poi_fused_mul|generalLayerNorm|layer_norm_kernel|_get_k_and_s",
    "RoPE, norms, writes": r"rope|rotary|RMSNorm|rms_norm|add_norm|eh_norm|kv_buffer|concat_mla|concat_and_c|join_query",
    "projections": r"fp8_gemm|fp8_blockscale_gemm|nvjet|splitKreduce|gemm|cublas|(early|tile|row|value)_products"
    r"|^head_(values|queries)",
}
"""Part to what the names of its kernels contain; the first one counts, and what is in none is `rest`. SwiGLU of dense layers is
the kernel of the experts' too. `exchange` is what goes between ranks but sums: of decode context parallel the gathered heads,
the parts of attention and what prepares and joins them; of tensor parallel the gathered logits."""

REST = "rest"
WAITS = 12
_COMPILED = {part: re.compile(words) for part, words in PARTS.items()}


@cache
def part_of(kernel: str) -> str:
    """The part that a kernel of this name is of."""
    return next((part for part, words in _COMPILED.items() if words.search(kernel)), REST)


def of_rounds(events: Iterable[dict], layers: int) -> dict:
    """Medians over the rounds of a trace, in microseconds.

    Args:
        events: of SGLang's profiler, with calls of the host.
        layers: that a round runs: the target's, and one a draft step and for draft-extend.

    Returns:
        rounds; parts, by name [launches, us of kernels]; layer, of the last round, as `one_layer` has it; kernel_us and
        launches of all; launches_a_layer; period_us; idle_us, where nothing runs on the GPU; graph_launch_us, how long the
        host is in the calls that launch a round's graphs.

    Raises:
        RuntimeError: the trace has fewer than three rounds.
    """
    events = list(events)
    marks = round_marks(events)
    ran = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    first = {}
    for e in ran:
        first.setdefault(e["args"].get("correlation"), e["ts"])
    begins = [first[mark["args"]["correlation"]] for mark in marks]
    if len(begins) < 3:
        raise RuntimeError(
            f"the trace has {max(0, len(begins) - 1)} whole rounds of one graph, and three are too few to compare"
        )
    launches = list(graph_launches(host_calls(events)).values())
    found = []
    for (begin, end), (called, next_called) in zip(pairwise(begins), pairwise(marks), strict=True):
        of_round = [e for e in ran if begin <= e["ts"] < end]
        of_host = [e["dur"] for e in launches if called["ts"] <= e["ts"] < next_called["ts"]]
        found.append(_of_round(of_round, begin, end) | {"graph_launch_us": sum(of_host)})
    last = marks[-1]["args"]["correlation"]
    layer = one_layer([op for op in ops(events) if op.launch == last])
    names = [*PARTS, REST]
    parts = {part: [_median(one["parts"].get(part, (0, 0.0))[i] for one in found) for i in (0, 1)] for part in names}
    told = {
        key: _median(one[key] for one in found) for key in ("kernel_us", "launches", "period_us", "idle_us", "graph_launch_us")
    }
    more = {"launches_a_layer": round(told["launches"] / layers, 1), "parts": parts, "layer": layer}
    return {"rounds": len(found), **told, **more}


def one_layer(replay: Replay) -> list[list]:
    """[kernel, begin, us, own] of each launch of a layer in the middle of a replay, in microseconds from the first one on.

    A layer is from the first launch of its attention, the kernel of most launches, to the next layer's, and has as many
    launches as most layers have: between the last of one forward and the first of another lies more. own is how much later a
    launch ends than all that began before it: what it adds to the time of the replay. Empty where attention has fewer than
    three launches.
    """
    of_attention = Counter(op.name for op in replay if part_of(op.name) == "attention")
    name, launches = next(iter(of_attention.most_common(1)), (None, 0))
    if launches < 3:
        return []
    starts = [i for i, op in enumerate(replay) if op.name == name and (not i or replay[i - 1].name != name)]
    if len(starts) < 2:
        return []
    layers = list(pairwise(starts))
    usual = Counter(behind - first for first, behind in layers).most_common(1)[0][0]
    alike = [layer for layer in layers if layer[1] - layer[0] == usual]
    first, behind = alike[len(alike) // 2]
    timed = list(along(replay))[first:behind]
    return [[op.name, round(op.begin - timed[0][0].begin, 2), round(op.us, 2), round(own, 2)] for op, own, _ in timed]


def before_rounds(events: Iterable[dict]) -> dict:
    """What a trace has before its first round, in microseconds: the prefills of a batch, of target and drafts.

    The profiler makes calls of the host longer, so this tells where the GPU waits for the host, not how long it would else.

    Args:
        events: of SGLang's profiler, with calls of the host.

    Returns:
        period_us from the first kernel to the first round; kernel_us and launches of all kernels; parts, by name [launches, us]
        of those that there are; layer, as `one_layer` has it; idle_us, where nothing runs on the GPU; graph_launches of the
        host; waits: the WAITS kernels before which the GPU was idle longest, each with its name, how often and how long.

    Raises:
        RuntimeError: the trace has no round, or nothing before it.
    """
    events = list(events)
    launched, ran = round_launches(events), ops(events)
    first = launched[0]["args"]["correlation"] if launched else None
    before = list(takewhile(lambda op: op.launch != first, ran))
    if first is None or not before:
        raise RuntimeError("the trace has no round of one graph, or nothing before the first")
    gaps: dict[str, list[float]] = {}
    for op, _, gap in along(before):
        if gap:
            gaps.setdefault(op.name, []).append(gap)
    begin, end, ended = before[0].begin, ran[len(before)].begin, max(op.begin + op.us for op in before)
    longest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:WAITS]
    return {
        "period_us": round(end - begin, 2),
        "kernel_us": round(sum(op.us for op in before), 2),
        "launches": len(before),
        "parts": {part: [count, round(us, 2)] for part, (count, us) in _by_part((op.name, op.us) for op in before).items()},
        "layer": one_layer(before),
        "idle_us": round(sum(map(sum, gaps.values())) + max(0.0, end - ended), 2),
        "graph_launches": sum(e["ts"] < launched[0]["ts"] for e in graph_launches(host_calls(events)).values()),
        "waits": [[name, len(of_name), round(sum(of_name), 2)] for name, of_name in longest],
    }


def _of_round(ran: list[dict], begin: float, end: float) -> dict:
    parts, reached, idle = _by_part((e["name"], e["dur"]) for e in ran), begin, 0.0
    for e in ran:
        idle += max(0.0, e["ts"] - reached)
        reached = max(reached, e["ts"] + e["dur"])
    idle += max(0.0, end - reached)
    kernel_us = sum(us for _, us in parts.values())
    return {"parts": parts, "kernel_us": kernel_us, "launches": len(ran), "period_us": end - begin, "idle_us": idle}


def _by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """[launches, us] by part, of kernels by name and us."""
    found: dict[str, list[float]] = {}
    for name, us in kernels:
        sums = found.setdefault(part_of(name), [0, 0.0])
        sums[0] += 1
        sums[1] += us
    return found


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)
