"""Traces of SGLang's profiler: what `printed/` does not show of how they are read as rounds, forwards and layers."""

from __future__ import annotations

import pytest
from stand_in_bench import Trace

from nsa_backend.benchmarks.commands import profile
from nsa_backend.benchmarks.reports import parts, traces

MORE = {
    "void deep_gemm::sched::sm90_paged_mqa_logits_metadata<32u, 256u, 132u, false>(unsigned int": "metadata",
    "_fused_dsa_target_verify_metadata_kernel": "metadata",
    "metadata_kernel": "metadata",
    "attend_kernel": "attention",
    "join_query_kernel": "RoPE, norms, writes",
    "topk_slots_kernel": "top-k",
    "void tensorrt_llm::kernels::deepseek_v3_topk_kernel<float, float, float, int, 256, true>(float*": "MoE",
    "void sglang::fused_store_indexer_cache<__nv_bfloat16, long, 6u, true>": "indexer",
    "nvjet_sm90_tss_64x8_64x16_1x1_h_bz_splitK_TNT": "projections",
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
    with pytest.raises(RuntimeError, match="left 0 traces"):
        traces.read_events(tmp_path)
