"""`bench profile`: a made-up trace of SGLang's profiler, read as forwards, layers and what lies between them."""

from __future__ import annotations

import gzip
import json

import pytest

from nsa_backend.benchmarks.commands import profile
from nsa_backend.benchmarks.reports import traces

LOGITS = "void deep_gemm::sm90_fp8_paged_mqa_logits<64u, 128u>(unsigned int, float*)"
LAYER = [("norm", 1.0), (LOGITS, 5.0), ("topk", 2.0), ("attention", 9.0)]
DRAFT = [("metadata", 3.0), *LAYER, ("sample", 1.0), *LAYER, ("sample", 1.0)]
VERIFY = [("metadata", 3.0), ("embed", 1.0), *LAYER * 4, ("norm", 1.0), ("head", 7.0)]
EXTEND = [("metadata", 3.0), *LAYER, ("head", 7.0)]
HELPER = [("schedule", 1.0), ("smxx_paged_mqa_logits_metadata", 1.0)]
PREFILL_LAYER = [("gemm", 20.0), ("attend", 30.0), ("gemm", 20.0)]


class Trace:
    """Events as the profiler writes them: a call on the host, then its ops, one after the other."""

    def __init__(self):
        self.events, self.now, self.calls = [], 0.0, 0

    def graph(self, ops) -> None:
        self.add("cudaGraphLaunch", ops)

    def eager(self, ops) -> None:
        for op in ops:
            self.add("cudaLaunchKernel", [op])

    def add(self, call: str, ops) -> None:
        self.calls += 1
        arguments = {"correlation": self.calls}
        self.events.append({"cat": "cuda_runtime", "name": call, "ts": self.now, "dur": 1, "args": arguments})
        for name, us in ops:
            self.events.append({"cat": "kernel", "name": name, "ts": self.now, "dur": us, "args": arguments})
            self.now += us + 0.5

    def prefill(self, layers: int) -> None:
        """Captured in pieces, each layer's attention eager between two graphs."""
        for _ in range(layers):
            self.graph([("gemm", 20.0)])
            self.eager([("attend", 30.0)])
            self.graph([("gemm", 20.0)])

    def ops(self) -> list[traces.Op]:
        return traces.ops(reversed(self.events))


def speculative(rounds: int) -> list[traces.Op]:
    trace = Trace()
    trace.prefill(5)
    for _ in range(rounds):
        trace.graph(HELPER)
        trace.graph(DRAFT)
        trace.eager([("copy", 2.0)])
        trace.graph(VERIFY)
        trace.eager([("copy", 2.0), ("tree", 4.0)])
        trace.graph(EXTEND)
    return trace.ops()


def test_a_speculative_round_is_told_apart_from_prefill():
    """The generation of one token launches a round too many, as overlap scheduling does."""
    found = profile.modes(speculative(20), speculative(1), 20, steps=3, layers=4, shape=(1, 300))
    assert list(found) == ["draft", "target_verify", "draft_extend", "prefill", "between"]
    assert {mode: r["replays"] for mode, r in found.items() if "replays" in r} == {
        "draft": 20, "target_verify": 20, "draft_extend": 20, "prefill": 1,
    }  # fmt: skip
    layer = {"attention": [1, 9.0], "norm": [1, 1.0], "sm90_fp8_paged_mqa_logits": [1, 5.0], "topk": [1, 2.0]}
    assert found["target_verify"]["layer"] == layer
    assert found["draft"]["layer"] == layer | {"sample": [1, 1.0]}
    assert found["draft_extend"]["layer"] is None
    assert found["target_verify"]["forward"]["norm"] == [5, 5.0]
    assert found["target_verify"]["span_us"] == sum(us + 0.5 for _, us in VERIFY) - 0.5
    assert found["prefill"]["forward"]["gemm"] == [10, 200.0]
    assert found["prefill"]["layer"] == {"attend": [1, 30.0], "gemm": [2, 40.0]}
    assert found["between"]["kernels"] == {
        "schedule": [0.95, 0.95], "smxx_paged_mqa_logits_metadata": [0.95, 0.95], "copy": [1.9, 3.8], "tree": [0.95, 3.8],
    }  # fmt: skip


def test_without_speculation_the_repeated_graph_is_decode():
    def generated(tokens: int) -> list[traces.Op]:
        trace = Trace()
        trace.prefill(2)
        for _ in range(tokens - 1):
            trace.graph(VERIFY[:10])
        return trace.ops()

    found = profile.modes(generated(64), generated(1), 63, steps=0, layers=2, shape=(1, 300))
    assert list(found) == ["decode", "prefill", "between"]
    assert (found["decode"]["replays"], found["between"]["kernels"]) == (63, {})
    assert found["prefill"]["forward"] == {"gemm": [4, 80.0], "attend": [2, 60.0]}


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
    def generated(tokens: int) -> list[traces.Op]:
        trace = Trace()
        trace.prefill(2)
        for _ in range(tokens):
            trace.graph(DRAFT)
            trace.graph(VERIFY)
        return trace.ops()

    found = profile.modes(generated(20), generated(0), 20, steps=3, layers=4, shape=(1, 300))
    assert list(found) == ["graph 1", "graph 2", "prefill", "between"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (LOGITS, "sm90_fp8_paged_mqa_logits"),
        ("_write_metadata", "_write_metadata"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Main<2, x>>>>(P)",
            "device_kernel<enable_sm90_or_later<FlashAttnFwdSm90>>",
        ),
        ("void (anonymous namespace)::topk_kernel<true>(Params)", "topk_kernel"),
    ],
)
def test_names_are_shortened_to_what_tells_kernels_apart(name, short):
    assert traces.short(name) == short


def test_a_folder_must_hold_one_trace(tmp_path):
    with pytest.raises(RuntimeError, match="left 0 traces"):
        traces.read_events(tmp_path)
    with gzip.open(tmp_path / "a.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": [{"name": "x"}]}, stream)
    assert traces.read_events(tmp_path) == [{"name": "x"}]


def test_both_sides_print(capsys):
    side = profile.modes(speculative(20), speculative(1), 20, steps=3, layers=4, shape=(1, 300))
    what = {"checkpoint": "faithful", "steps": 3, "batch": 1, "length": 300}
    profile.show({"rows": [what | {"mode": mode, "ours": r, "builtin": r} for mode, r in side.items()]})
    printed = capsys.readouterr().out
    assert "1 x 300, target_verify: one layer" in printed
    assert "a round outside its graphs" in printed
    assert "target_verify: where the time of one forward goes, us; ours: span 89.5, from one replay to the next" in printed


def test_calls_of_a_round_leave_the_prefill_and_other_threads_out():
    trace = Trace()
    trace.prefill(5)
    for _ in range(6):
        trace.graph(HELPER)
        trace.graph(VERIFY)
        trace.eager([("copy", 2.0), ("copy", 2.0)])
        trace.add("cudaStreamSynchronize", [])
        trace.graph(EXTEND)
    trace.eager([("tail", 1.0)] * 9)
    events = [event | {"tid": 1} for event in trace.events]
    others = [event | {"tid": 2} for event in trace.events if event["cat"] == "cuda_runtime"]
    expected = {"cudaGraphLaunch": 3.0, "cudaLaunchKernel": 2.0, "cudaStreamSynchronize": 1.0}
    assert traces.calls_a_round([*events, *others]) == expected
    few = Trace()
    for _ in range(3):
        few.graph(VERIFY)
    assert traces.calls_a_round(few.events) == {}
