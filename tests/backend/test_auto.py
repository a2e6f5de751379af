"""The measured choice of the decode implementation: the table, its bound on what is lost, and the dispatch by rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import config
from nsa_backend.attention import auto
from nsa_backend.attention.implementations import build_decode, decode_for, prefill_for, with_choices
from nsa_backend.benchmarks.reports import auto_table
from nsa_backend.config import AttentionConfig

ROOT = Path(__file__).resolve().parents[2]
H200 = "NVIDIA H200"
MEASURED = json.loads(auto.TABLE.read_text())[H200]
FP8 = {"kv_cache_dtype": torch.float8_e4m3fn}


def test_the_table_is_what_the_result_file_gives():
    assert auto_table.derive(ROOT / MEASURED["source"], ROOT / MEASURED["together_source"]) == {H200: MEASURED}


@pytest.mark.parametrize("kv", auto.CANDIDATES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_no_row_count_loses_more_than_two_percent(kv, heads):
    """Against the fastest, in the mean of the two passes that the table was made from."""
    report = json.loads((ROOT / MEASURED["source"]).read_text())
    (found,) = [r for r in report["by_rows"] if (r["kv"], r["heads"]) == (kv, heads)]
    assert found["rows"][:72] == list(range(1, 73))
    assert found["rows"][-1] == 512
    table = auto.intervals(H200, kv, heads)
    for i, rows in enumerate(found["rows"]):
        times = {n: sum(one[n][i] for one in found["passes"]) for n in auto.CANDIDATES[kv]}
        assert times[auto.choose(table, rows)] <= 1.02 * min(times.values()), rows


def test_another_gpu_agrees():
    """The same hour on another GPU of the type."""
    report = json.loads((ROOT / "benchmarks/results/attention_0_5_23_h200.json").read_text())["reports"]["decode"]
    assert len(report["decode"]) == 100
    for row in report["decode"]:
        chosen = row["us"][auto.choose(auto.intervals(H200, row["kv"], row["heads"]), row["rows"])]
        assert chosen <= 1.02 * min(row["us"][name] for name in auto.CANDIDATES[row["kv"]]), row


@pytest.mark.parametrize("kv", auto.CANDIDATES)
def test_every_row_count_has_a_choice(kv):
    for heads in (1, 8, 16, 24, 32, 64, 100, 128, 200):
        table = auto.intervals(H200, kv, heads)
        assert [most for most, _ in table] == sorted(most for most, _ in table)
        for rows in (0, 1, 7, 64, 512, 100_000):
            assert auto.choose(table, rows) in auto.CANDIDATES[kv]


class Named:
    def __init__(self, name: str):
        self.name, self.reserved = name, []

    def reserve(self, max_rows):
        self.reserved.append(max_rows)

    def prepare(self, metadata):
        return self.name

    def forward(self, inputs):
        return self.name


def test_a_call_goes_where_its_rows_belong(monkeypatch):
    chosen = object.__new__(auto.Auto)
    chosen._table, chosen._least = [(4, "fa3"), (64, "flashmla_sparse"), (512, "fa3")], {4: 32, 6: 12}
    chosen._built = {name: Named(name) for name in ("fa3", "flashmla_sparse", auto.TOGETHER)}
    alone = ((1, "fa3"), (4, "fa3"), (5, "flashmla_sparse"), (64, "flashmla_sparse"), (65, "fa3"), (900, "fa3"))
    for rows, of_request, want in (
        *((rows, 1, want) for rows, want in alone),
        *((28, 4, "flashmla_sparse"), (32, 4, auto.TOGETHER), (35, 5, "flashmla_sparse")),  # five were not measured
        *((12, 6, auto.TOGETHER), (900, 3, "fa3"), (512, 4, auto.TOGETHER)),
    ):
        assert chosen.forward(SimpleNamespace(q_nope=torch.zeros(rows, 1, 1), rows_per_request=of_request)) == want
        metadata = SimpleNamespace(nsa_cache_seqlens_int32=torch.zeros(rows), rows_per_request=of_request)
        assert chosen.prepare(metadata) == want
    chosen.reserve(7)
    assert [b.reserved for b in chosen._built.values()] == [[7], [7], [7]]


def test_rows_go_together_from_where_every_overlap_gains():
    """More rows than the last ones that lose anywhere; overlaps that nobody has do not count."""
    rows = [
        {
            "kv": "bf16",
            "heads": 16,
            "rows_per_request": 4,
            "requests": n,
            "overlap": overlap,
            "us": {"fa3": 10, auto.TOGETHER: us},
        }
        for n, overlap, us in ((1, 0.9, 9), (8, 0.5, 11), (8, 0.9, 5), (16, 0.5, 9), (16, 0.9, 5), (32, 0.0, 20), (32, 0.5, 8))
    ]
    assert auto_table._together(rows, "bf16") == {"16": {"4": 64}}
    assert auto_table._together(rows, "fp8") == {}
    assert auto_table._together([row | {"us": {"fa3": 1, auto.TOGETHER: 2}} for row in rows], "bf16") == {}


def test_auto_can_run_where_it_was_measured():
    facts = {"device_sm": 90, "num_heads": 16, "index_topk": 2048, "device_name": H200}
    assert auto.problems(AttentionConfig(**facts, kv_cache_dtype=torch.bfloat16)) == []
    assert auto.problems(AttentionConfig(**facts, kv_cache_dtype=torch.float8_e4m3fn)) == []
    (reason,) = auto.problems(AttentionConfig(**facts | {"index_topk": 192}, kv_cache_dtype=torch.bfloat16))
    assert "index_topk in multiples of 128" in reason


@pytest.mark.parametrize(
    ("switch", "named", "by_user", "facts", "want"),
    [
        (None, "fa3", False, {}, "auto"),
        (None, "fa3", True, {}, "fa3"),  # a name that the user gives is used as it is
        ("0", "fa3", False, {}, "fa3"),
        ("1", "flashmla_sparse", True, {}, "auto"),
        (None, "flashmla_kv", False, FP8, "auto"),
        (None, "flashmla_kv", True, FP8, "flashmla_kv"),
        (None, "trtllm", False, FP8, "trtllm"),  # not what SGLang takes on Hopper
        (None, "fa3", False, {"device_name": "NVIDIA H100"}, "fa3"),
        (None, "fa3", False, {"index_topk": 192}, "fa3"),  # one of the candidates cannot run
        (None, "torch", False, {"device_sm": 0, "device_name": ""}, "torch"),
    ],
)
def test_auto_serves_where_nobody_names_an_implementation(monkeypatch, switch, named, by_user, facts, want):
    monkeypatch.delenv("NSA_BACKEND_AUTO_DECODE", raising=False)
    if switch is not None:
        monkeypatch.setenv("NSA_BACKEND_AUTO_DECODE", switch)
    known = {"device_sm": 90, "num_heads": 16, "index_topk": 2048, "device_name": H200, "kv_cache_dtype": torch.bfloat16}
    assert decode_for(named, by_user, AttentionConfig(**known | facts)) == want


def test_the_switch_asks_for_auto(make_runner, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_AUTO_DECODE", "1")
    with pytest.raises(ValueError, match=r"^NSA_BACKEND_AUTO_DECODE=1 cannot run here: it was measured on NVIDIA H200"):
        build_decode(with_choices(config.BackendConfig.from_runner(make_runner())))
    monkeypatch.setenv("NSA_BACKEND_AUTO_DECODE", "0")
    assert with_choices(config.BackendConfig.from_runner(make_runner())).decode_impl == "torch"


@pytest.mark.parametrize(
    ("named", "by_user", "facts", "want"),
    [
        ("flashmla_sparse", False, {}, "auto"),
        ("flashmla_sparse", True, {}, "flashmla_sparse"),  # a name that the user gives is used as it is
        ("fa3", False, {}, "fa3"),
        ("flashmla_sparse", False, {"num_heads": 32}, "auto"),
        ("flashmla_sparse", False, {"num_heads": 128}, "flashmla_sparse"),  # DP attention: a tile has no room for two rows
        ("flashmla_kv", False, FP8, "auto"),
        ("flashmla_kv", True, FP8, "flashmla_kv"),
        ("flashmla_sparse", False, FP8, "flashmla_sparse"),  # which SGLang takes there for nobody
        ("flashmla_sparse", False, {"device_name": "NVIDIA H100"}, "flashmla_sparse"),
        ("flashmla_sparse", False, {"sinks": True}, "flashmla_sparse"),
        ("flashmla_sparse", False, {"context_ranks": 2}, "flashmla_sparse"),
    ],
)
def test_prefill_goes_by_rows_where_nobody_names_an_implementation(named, by_user, facts, want):
    known = {"device_sm": 90, "num_heads": 16, "index_topk": 2048, "device_name": H200, "kv_cache_dtype": torch.bfloat16}
    assert prefill_for(named, by_user, AttentionConfig(**known | facts)) == want


def test_ranks_that_may_divide_a_prefill_have_what_is_named(make_runner, monkeypatch):
    monkeypatch.setattr(auto, "problems", lambda config: [])
    runner = config.BackendConfig.from_runner(make_runner())
    one = replace(runner, prefill_impl="flashmla_sparse", prefill_by_user=False)
    assert with_choices(one).prefill_impl == "auto"
    assert with_choices(replace(one, split_prefill=True)).prefill_impl == "flashmla_sparse"


@pytest.mark.parametrize(
    ("rows", "slots", "want"), [(1023, 9, "flashmla_sparse"), (1024, 9, "sparse_prefill"), (1024, 2**24, "flashmla_sparse")]
)
def test_a_prefill_of_many_rows_takes_them_together(rows, slots, want):
    """Its kernel counts slots in 24 bits."""
    chosen = object.__new__(auto.AutoPrefill)
    chosen._least, chosen._few, chosen._many = 1024, Named("flashmla_sparse"), Named("sparse_prefill")
    inputs = SimpleNamespace(q_nope=torch.empty(rows, 1, 1, device="meta"), kv_cache=torch.empty(slots, 1, device="meta"))
    assert chosen.forward(inputs) == want


def test_a_prefill_goes_together_from_where_every_overlap_gains():
    rows = [
        {"kv": "bf16", "heads": 16, "rows": rows, "overlap": overlap, "us": {"flashmla_sparse": 10, "sparse_prefill": us}}
        for rows, overlap, us in (
            (300, 0.5, 11),
            (300, 0.9, 8),
            (1000, 0.5, 9),
            (1000, 0.9, 5),
            (8000, 0.5, 9),
            (8000, 0.0, 20),
        )
    ]
    fp8 = {"kv": "fp8", "heads": 8, "rows": 8000, "overlap": 0.9, "us": {"flashmla_kv": 10, "sparse_prefill": 4}}
    assert auto_table._prefill([*rows, fp8], "bf16") == {"16": 1000}
    assert auto_table._prefill([*rows, fp8], "fp8") == {"8": 8000}
    assert auto_table._prefill([row | {"us": {"flashmla_sparse": 10, "sparse_prefill": 9.6}} for row in rows], "bf16") == {}


@pytest.mark.parametrize(("rows", "prepared"), [(1023, True), (1024, False)])
def test_a_prefill_of_few_rows_has_its_schedule_made_once_for_all_layers(rows, prepared):
    chosen = object.__new__(auto.AutoPrefill)
    chosen._least, chosen._few, chosen._many = 1024, Named("flashmla_kv"), Named("sparse_prefill")
    metadata = SimpleNamespace(nsa_cache_seqlens_int32=torch.empty(rows, device="meta"))
    assert chosen.prepare(metadata) == ("flashmla_kv" if prepared else metadata)
