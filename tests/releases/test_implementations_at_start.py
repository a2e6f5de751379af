"""Implementations that cannot run with the other options: refused in the main process, which loads no weights."""

from __future__ import annotations

import pytest
import torch

from nsa_backend import start_checks
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention import implementations
from nsa_backend.environment import SWITCHES


@pytest.fixture
def start(resolve, monkeypatch):
    """Returns a function of options by which a server with these starts as far as its check, on an H200 or another GPU."""
    for switch in SWITCHES:
        monkeypatch.delenv(switch, raising=False)

    def started(kv: str, decode: str, prefill: str, *words: str) -> None:
        chosen = (adapter.DECODE_OPTION, decode, adapter.PREFILL_OPTION, prefill)
        server_args = resolve("--attention-backend", adapter.BACKEND_NAMES[0], "--kv-cache-dtype", kv, *chosen, *words)
        server_args.check_server_args()

    return started


@pytest.mark.parametrize(
    ("kv", "decode", "prefill"),
    [
        ("bfloat16", "fa3", "flashmla_sparse"),
        ("bfloat16", "flashmla_sparse", "flashmla_auto"),
        ("bfloat16", "sparse_decode", "fa3"),
        ("fp8_e4m3", "flashmla_kv", "flashmla_kv"),
        ("fp8_e4m3", "sparse_decode", "flashmla_auto"),
        ("bfloat16", "sparse_verify", "fa3"),
        ("fp8_e4m3", "sparse_verify", "flashmla_auto"),
    ],
)
def test_what_can_run_starts(start, kv, decode, prefill):
    start(kv, decode, prefill)


@pytest.mark.parametrize(
    ("kv", "decode", "prefill", "reason"),
    [
        ("fp8_e4m3", "fa3", "flashmla_kv", f"{adapter.DECODE_OPTION} fa3 cannot run here: it reads a bfloat16 KV cache"),
        ("bfloat16", "flashmla_kv", "flashmla_sparse", f"{adapter.DECODE_OPTION} flashmla_kv cannot run here: it reads an fp8"),
        ("fp8_e4m3", "flashmla_kv", "fa3", f"{adapter.PREFILL_OPTION} fa3 cannot run here: it reads a bfloat16 KV cache"),
        ("bfloat16", "fa3", "sparse_prefill", f"{adapter.PREFILL_OPTION} sparse_prefill .* this rank has 64"),
        ("bfloat16", "trtllm", "flashmla_sparse", "its kernel is built for Blackwell .* and this device is SM90"),
    ],
)
def test_what_cannot_does_not(start, kv, decode, prefill, reason):
    with pytest.raises(ValueError, match=f"{reason}.* Choose one of: .*; or set NSA_BACKEND_DISABLE=1"):
        start(kv, decode, prefill)


@pytest.mark.parametrize(
    ("kv", "sglangs"), [("bfloat16", ["fa3", "flashmla_sparse"]), ("fp8_e4m3", ["flashmla_kv", "flashmla_kv"])]
)
def test_a_server_that_names_none_has_auto_where_the_release_keeps_what_was_typed(resolve, monkeypatch, kv, sglangs):
    """In its main process as in its ranks, which read what SGLang has published."""
    monkeypatch.delenv("NSA_BACKEND_AUTO_DECODE", raising=False)
    asked_for = []
    monkeypatch.setattr(start_checks, "check_attention", lambda name, *others: asked_for.append(name))
    words = "--attention-backend", adapter.BACKEND_NAMES[0], "--kv-cache-dtype", kv
    heads = "--tp-size", "8"  # with which the rows of a prefill go together
    for named in ((), (adapter.DECODE_OPTION, sglangs[0], adapter.PREFILL_OPTION, sglangs[1])):
        server_args = resolve(*words, *heads, *named)
        start_checks.check_implementations(server_args)
        keeps = hasattr(server_args, "resolve_once")
        assert adapter.named_by_user(server_args) == (bool(named) or not keeps,) * 2
        assert asked_for == (["auto", "auto"] if keeps and not named else sglangs)
        asked_for.clear()


def test_another_gpu(start, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_AUTO_DECODE", "1")
    start("bfloat16", "fa3", "flashmla_sparse")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H20")
    with pytest.raises(
        ValueError, match="NSA_BACKEND_AUTO_DECODE=1 cannot run here: it was measured on NVIDIA H200 and this device"
    ):
        start("bfloat16", "fa3", "flashmla_sparse")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [((), 1), (("--tp-size", "8"), 8), (("--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"), 2)],
)
def test_heads_are_those_of_a_rank(start, monkeypatch, words, ranks):
    seen = []
    monkeypatch.setattr(implementations.implementation("fa3"), "problems", lambda config: seen.append(config.num_heads) or [])
    start("bfloat16", "fa3", "flashmla_sparse", *words)
    assert seen == [64 // ranks]
