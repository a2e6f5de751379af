"""Traces of SGLang's profiler: what `printed/` does not show of how they are read as rounds, forwards and layers."""

from __future__ import annotations

import gzip
import json

import pytest
from stand_in_bench import Trace

from nsa_backend.benchmarks.commands import profile
from nsa_backend.benchmarks.reports import parts, traces
from nsa_backend.benchmarks.reports.cells import LostCellError

MERGES = ("_correct_attn_cp_out_kernel", "_dcp_pack_a2a_send_kernel", "_dcp_lse_combine_kernel")
"""How SGLang 0.5.23 prepares and joins the parts of decode context parallel."""

MORE = {
    "void deep_gemm::sched::sm90_paged_mqa_logits_metadata<32u, 256u, 132u, false>(unsigned int": "metadata",
    "_fused_dsa_target_verify_metadata_kernel": "metadata",
    "metadata_kernel": "metadata",
    "attend_kernel": "attention",
    "attend": "attention",  # of CUDA C++
    "join_query_kernel": "RoPE, norms, writes",
    "topk_slots_kernel": "top-k",
    "void tensorrt_llm::kernels::deepseek_v3_topk_kernel<float, float, float, int, 256, true>(float*": "MoE",
    "void sglang::fused_store_indexer_cache<__nv_bfloat16, long, 6u, true>": "indexer",
    "nvjet_sm90_tss_64x8_64x16_1x1_h_bz_splitK_TNT": "projections",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-reduce",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(sglang::RankData*, sglang::RankSignals": "all-reduce",
    "void (anonymous namespace)::all_reduce_1shot_push_kernel<__nv_bfloat16, 2u, true>((anonymous namespace)": "all-reduce",
    "void (anonymous namespace)::all_reduce_2shot_pull_kernel<__nv_bfloat16, 2u, true>((anonymous namespace)": "all-reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer": "all-reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<(flashinfer": "all-reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "exchange",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "exchange",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "exchange",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exchange",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "exchange",
    **dict.fromkeys(MERGES, "exchange"),
    "transform_index_page_table_dcp_kernel": "exchange",
    "local_slots_kernel": "exchange",
    "partial_lse_kernel": "exchange",
    **dict.fromkeys(("gate_up_kernel", "down_kernel", "activate_kernel", "order_kernel", "gate_up_rows", "down_blocks"), "MoE"),
    **dict.fromkeys(("gate_up", "down", "whole_experts", "router", "_router_triton_kernel"), "MoE"),
    **dict.fromkeys(("early_products", "tile_products", "row_products", "value_products_kernel"), "projections"),
    **dict.fromkeys(("head_values", "head_queries"), "projections"),
    "quantise_kernel": "quantisation",
    **dict.fromkeys(("rope_quantise", "norm_rope_store", "add_norm"), "RoPE, norms, writes"),
    "transform_index_page_table_decode_kernel": "rest",
}


@pytest.mark.parametrize(("name", "part"), MORE.items())
def test_a_kernel_is_of_one_part(name, part):
    assert parts.part_of(name) == part


def test_a_path_adds_up_to_the_span_however_kernels_overlap():
    """`b` begins inside `a` and waits for it; `c` begins and ends inside `b`; `d` begins 3 us after all of them."""
    ops = [traces.Op("a", 100.0, 10.0, 1), traces.Op("b", 104.0, 10.0, 1), traces.Op("c", 106.0, 2.0, 1)]
    ops += [traces.Op("d", 117.0, 5.0, 1), traces.Op("a", 122.5, 1.0, 1)]
    found = traces.path([ops])
    assert found == {"a": (11.0, 0.5), "b": (4.0, 0.0), "c": (0.0, 0.0), "d": (5.0, 3.0)}
    assert sum(map(sum, found.values())) == traces.span_us([ops]) == 23.5
    later = [traces.Op(op.name, op.begin + 40.0, op.us + 2.0, 2) for op in ops if op.name != "c"]
    assert traces.path([ops, later, later])["a"] == (13.5, 0.0)
    assert traces.period_us([later, ops]) == 40.0
    assert traces.period_us([ops]) is None


def test_graphs_that_cannot_be_named_are_numbered():
    """Of a round without a graph for its drafts, nothing tells which is which."""
    made = [Trace().generation(rounds, steps=0, layers=4) for rounds in (20, 0)]
    found = profile.modes(*(traces.ops(trace.events) for trace in made), 20, steps=3, layers=4, shape=(1, 300))
    assert list(found) == ["graph 1", "prefill", "between"]


def test_calls_of_a_round_leave_the_prefill_and_other_threads_out(tmp_path):
    trace = Trace().generation(6, steps=3, layers=4)
    trace.eager(*["tail"] * 9)
    assert traces.calls_a_round(trace.events) == {"cudaGraphLaunch": 4.0, "cudaLaunchKernel": 3.0, "cudaStreamSynchronize": 1.0}
    few = Trace().generation(3, steps=3, layers=1).events
    assert traces.calls_a_round(few) == {}
    with pytest.raises(RuntimeError, match="three are too few"):
        parts.of_rounds(few, 4)


def test_a_prefill_in_many_pieces_is_no_round():
    """Eight prompts of 4096 tokens are four chunks: 244 pieces of the layers of a rank, before 31 rounds of one graph."""
    trace = Trace()
    for _ in range(4 * 61):
        trace.graph("gemm", "quant", "norm", "moe_align")
        trace.eager("attend")
    trace.generation(31, steps=0, layers=61)
    assert parts.of_rounds(trace.events, 61)["rounds"] == 29
    assert traces.calls_a_round(trace.events)["cudaGraphLaunch"] == 2.0


def test_a_layer_goes_from_one_attention_to_the_next():
    """Of a round's middle, with what each launch adds to its time."""
    trace = Trace()
    for _ in range(5):
        trace.graph("embed", *["norm", "attend", "gemm"] * 4, "sample")
    found = parts.of_rounds(trace.events, 4)["layer"]
    assert [name for name, *_ in found] == ["attend", "gemm", "norm"]
    assert [begin for _, begin, _, _ in found] == [0.0, 6.5, 9.0]
    assert all(us == own for _, _, us, own in found)
    trace = Trace()
    for _ in range(5):
        trace.graph("embed", "attend", "attend", "sample")
    assert parts.of_rounds(trace.events, 4)["layer"] == []


def test_a_layer_of_a_prefill_is_told_too():
    """Whatever attention it begins with."""
    trace = Trace()
    trace.eager("flash_fwd_splitkv_mla_kernel")
    for _ in range(5):
        trace.graph("norm", "gemm")
        trace.eager("attend")
    for _ in range(3):
        trace.graph("gemm", "attend", "gemm")
    assert [name for name, *_ in parts.before_rounds(trace.events)["layer"]] == ["attend", "norm", "gemm"]


def test_attention_of_a_layer_may_be_several_launches():
    """As of a prefill with more rows than fit one."""
    trace = Trace()
    for _ in range(5):
        trace.graph("norm", "gemm")
        trace.eager("attend")
        trace.eager("attend")
    for _ in range(3):
        trace.graph("gemm", "attend", "gemm")
    assert [name for name, *_ in parts.before_rounds(trace.events)["layer"]] == ["attend", "attend", "norm", "gemm"]


def test_no_layer_is_told_that_ends_in_the_next_forward():
    """Of two chunks of a prompt, the second begins behind the logits of the first, which is the middle."""
    trace = Trace()
    for _ in range(2):
        trace.graph("embed")
        for _ in range(3):
            trace.graph("norm")
            trace.eager("attend")
        trace.graph("logits")
    for _ in range(3):
        trace.graph("gemm", "attend", "gemm")
    assert [name for name, *_ in parts.before_rounds(trace.events)["layer"]] == ["attend", "norm"]


def test_a_prefill_is_told_by_what_the_gpu_waits_for():
    """Kernels follow each other after 0.5 us here, but for one that the host launches 100 us late."""
    trace = Trace()
    trace.graph("gemm", "gemm")  # 2 us each
    trace.now += 100.0
    trace.eager("attend")  # 6 us
    trace.graph("gemm")
    first_round = trace.now
    for _ in range(3):
        trace.graph("gemm", "attend", "gemm")
    found = parts.before_rounds(trace.events)
    assert found["waits"] == [["attend", 1, 100.5], ["gemm", 2, 1.0]]
    assert (found["launches"], found["graph_launches"], found["kernel_us"]) == (4, 2, 12.0)
    assert found["parts"] == {"projections": [3, 6.0], "attention": [1, 6.0]}
    assert found["layer"] == []
    assert found["period_us"] == first_round
    assert found["idle_us"] == first_round - 12.0
    with pytest.raises(RuntimeError, match="nothing before the first"):
        parts.before_rounds([e for e in trace.events if e["ts"] >= first_round])


def test_a_trace_that_ends_early_says_so(tmp_path):
    with gzip.open(tmp_path / "1764000000.5-TP-0.trace.json.gz", "wt") as stream:
        stream.write('{"traceEvents": [{"name": "attend",')
    with pytest.raises(LostCellError, match=r"""behind '{"traceEvents.*"attend",'\): look whether a disk is full"""):
        traces.read_events(tmp_path)


def test_of_several_ranks_the_first_one_s_trace_is_read(tmp_path):
    """SGLang 0.5.23 names a trace by its time and rank; ranks of expert parallel are named behind."""
    with pytest.raises(RuntimeError, match="left 0 traces of a first rank"):
        traces.read_events(tmp_path)
    for name in ("1764000000.5-TP-0-EP-0", "1764000000.5-TP-1-EP-1", "1764000000.5-TP-10"):
        with gzip.open(tmp_path / f"{name}.trace.json.gz", "wt") as stream:
            json.dump({"traceEvents": [name]}, stream)
    assert traces.read_events(tmp_path) == ["1764000000.5-TP-0-EP-0"]
    (tmp_path / "1764000000.5-TP-0-EP-0.trace.json.gz").rename(tmp_path / "1764000000.5-TP-2.trace.json.gz")
    with pytest.raises(RuntimeError, match="left 0 traces of a first rank"):
        traces.read_events(tmp_path)
