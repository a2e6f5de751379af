"""What a backend takes from its rank and its packages when it is built: query heads, and DeepGEMM's rule."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.implementations import build_attention
from nsa_backend.config import AttentionConfig, BackendConfig
from nsa_backend.indexer import schedule_check
from nsa_backend.kernels.metadata_torch import paged_mqa_schedule
from nsa_backend.registration import check_server_args, create_backend
from nsa_backend.testing.calls import calls

NUM_SMS = 132


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_implementation_is_built_for_the_heads_of_one_rank(make_runner, monkeypatch, ranks):
    """Kernels pad heads, choose tiles and schedule by the heads that this rank has of the model's."""
    runner = make_runner()
    runner.model_config.num_attention_heads = 128
    monkeypatch.setattr(adapter, "attention_tp_size", lambda: ranks)
    multi_step = calls.draft_factory(runner, 3).create_decode_backend()
    for backend in (create_backend(runner), *multi_step.attn_backends):
        assert backend.config.attention.num_heads == 128 // ranks


@pytest.mark.parametrize(
    ("device_sm", "dtype", "can"),
    [
        (90, torch.bfloat16, "fa3, flashmla_sparse, sparse_decode, sparse_verify"),
        (90, torch.float8_e4m3fn, "flashmla_kv, sparse_decode, sparse_verify"),
        (100, torch.bfloat16, "trtllm"),
        (0, torch.bfloat16, "torch"),
        (80, torch.bfloat16, "none on this machine"),
    ],
)
def test_a_refusal_names_what_can_run_instead(monkeypatch, device_sm, dtype, can):
    monkeypatch.setattr(adapter, "package_problem", lambda name: None)
    facts = AttentionConfig(device_sm=device_sm, num_heads=64, kv_cache_dtype=dtype, index_topk=2048)
    with pytest.raises(ValueError, match=rf"no such implementation\. Choose one of: {can}; or set NSA_BACKEND_DISABLE=1"):
        build_attention("tilelang", "--nsa-decode-backend tilelang", facts)


@pytest.fixture
def on_a_gpu_with(make_runner, monkeypatch):
    """Returns a function of DeepGEMM's schedule rule that builds a backend which finds such a DeepGEMM on its GPU."""
    from_runner, surplus_last = BackendConfig.from_runner, adapter.schedule_surplus_last(90)

    def build(rule):
        deep_gemm = SimpleNamespace(
            get_num_sms=lambda: NUM_SMS,
            get_paged_mqa_logits_metadata=lambda lens, page_size, num_sms: rule(lens[:, -1], num_sms, surplus_last),
        )
        monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
        return create_backend(make_runner())

    on_cpu = SimpleNamespace(**vars(torch))
    on_cpu.tensor = lambda values, dtype, device: torch.tensor(values, dtype=dtype)
    monkeypatch.setattr(schedule_check, "torch", on_cpu)
    monkeypatch.setattr(
        BackendConfig,
        "from_runner",
        lambda runner: replace(from_runner(runner), num_sms=NUM_SMS, surplus_last=surplus_last),
    )
    schedule_check.check_schedule.cache_clear()
    yield build
    schedule_check.check_schedule.cache_clear()


def other_surplus(lens, num_sms, surplus_last):
    """The other release's rule: the SMs at the other end get a segment more."""
    return paged_mqa_schedule(lens, num_sms, not surplus_last)


def other_where_it_divides(lens, num_sms, surplus_last):
    """A rule that differs only where there are as many segments as SMs, or more."""
    known = paged_mqa_schedule(lens, num_sms, surplus_last)
    return known + 1 if len(lens) >= num_sms else known


def other_for_one_row(lens, num_sms, surplus_last):
    """A rule that differs only for a single short row."""
    known = paged_mqa_schedule(lens, num_sms, surplus_last)
    return known + 1 if len(lens) == 1 else known


@pytest.mark.parametrize("pairs", ["0", "1"])
@pytest.mark.parametrize("rule", [other_surplus, other_where_it_divides, other_for_one_row])
def test_a_deep_gemm_that_divides_in_another_way_is_refused_when_the_backend_is_built(on_a_gpu_with, monkeypatch, pairs, rule):
    monkeypatch.setenv("NSA_BACKEND_PAIRED_LOGITS", pairs)
    with pytest.raises(ValueError, match="divides paged-MQA work by a rule that nsa_backend does not know"):
        on_a_gpu_with(rule)


def test_single_rows_are_looked_at_where_rows_go_two_by_two_as_well(on_a_gpu_with, monkeypatch):
    """Decode has them, and a verify of one request."""
    monkeypatch.setenv("NSA_BACKEND_PAIRED_LOGITS", "1")
    looked_at = []
    rule = adapter.deep_gemm_schedule
    monkeypatch.setattr(adapter, "deep_gemm_schedule", lambda lens, next_n: looked_at.append(next_n) or rule(lens, next_n))
    on_a_gpu_with(paged_mqa_schedule)
    assert set(looked_at) == {1, 2}


def test_the_deep_gemm_that_divides_as_the_launch_does_serves(on_a_gpu_with):
    backend = on_a_gpu_with(paged_mqa_schedule)
    assert backend.config.num_sms == NUM_SMS


@pytest.mark.parametrize(("runs", "said"), [(True, "dense MHA up to 123 tokens"), (False, "dense MHA off")])
def test_the_log_says_how_long_a_dense_prefill_gets(make_runner, monkeypatch, caplog, runs, said):
    backend = create_backend(make_runner())
    backend.dense_prefill.runs = runs
    monkeypatch.setattr(adapter, "dense_prefill_limit", lambda: 123)
    with caplog.at_level("INFO", logger="nsa_backend"):
        backend.log_start(0)
    assert said in caplog.text


@pytest.mark.parametrize("backend", [adapter.BACKEND_NAMES[0], "triton"])
def test_sglangs_own_check_of_the_options_is_made_first(resolve, backend):
    class Refused(Exception):
        pass

    def refuse(server_args):
        raise Refused(server_args.page_size)

    with pytest.raises(Refused):
        check_server_args(refuse, resolve("--attention-backend", backend))


def test_without_speculation_there_are_no_draft_steps(make_runner):
    """The options then hold None."""
    runner = make_runner()
    vars(runner).update(calls.publish(None, None))
    settings = adapter.settings(runner)
    assert (settings.num_steps, settings.num_draft_tokens) == (0, 0)


@pytest.mark.parametrize(("capability", "device_sm"), [((9, 0), 90), ((10, 3), 103)])
def test_a_device_is_known_by_its_capability(monkeypatch, capability, device_sm):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert adapter.device_sm("cuda:1") == device_sm
    assert adapter.device_sm("cpu") == 0
