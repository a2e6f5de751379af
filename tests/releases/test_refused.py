"""What stops a server at start, read from ServerArgs that the release itself has resolved."""

import argparse
import pkgutil
from types import SimpleNamespace

import pytest
from installed_source import server_fields
from server_words import OWN, SPECULATIVE
from sglang.srt.server_args import ServerArgs

from nsa_backend import start_checks
from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.option_rules import OFF
from nsa_backend.refusals import RULES, refusals
from nsa_backend.releases import (
    DIVIDED_INDEXERS,
    FEW_EXPERTS,
    ROUND_WARM_UP,
    installed,
    layer_front_problem,
    round_graph_problem,
)

FIELDS = server_fields()

REFUSED = {rule.attribute: rule for rule in adapter.REFUSED if rule.attribute in FIELDS}


def test_the_door_lists_what_it_asks_in_order(resolve, monkeypatch):
    """And of the other moments, functions that there are."""
    asked = []
    monkeypatch.setenv("NSA_BACKEND_REQUIRED", "1")
    listed = [check.asked_by.rpartition(".")[2] for check in start_checks.CHECKS if check.when == start_checks.OPTIONS]
    for name in listed:
        monkeypatch.setattr(start_checks, name, lambda *arguments, name=name: asked.append(name))
    resolve("--attention-backend", adapter.BACKEND_NAMES[0]).check_server_args()
    assert asked == listed
    assert all(callable(pkgutil.resolve_name(check.asked_by)) for check in start_checks.CHECKS)


def test_a_default_server_is_served(arguments):
    assert refusals(arguments()) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_this_generation_alone_has(arguments, name):
    rule = REFUSED[name]
    (sentence,) = refusals(arguments(**{name: True if rule.served == OFF else "nothing served"}))
    assert sentence.startswith(f"nsa_backend does not serve {rule.option}")
    assert ("NSA_BACKEND_DISABLE=1" in sentence) == rule.builtin_serves
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "bad", "option"),
    [
        ("device", "cpu", "--device cpu"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
        ("page_size", 1, "--page-size 1"),
        (adapter.DECODE_ATTRIBUTE, "tilelang", f"{adapter.DECODE_OPTION} tilelang"),
        (adapter.DECODE_ATTRIBUTE, "aiter", f"{adapter.DECODE_OPTION} aiter"),
        (adapter.PREFILL_ATTRIBUTE, "tilelang", f"{adapter.PREFILL_OPTION} tilelang"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_multi_layer_eagle", True, "--enable-multi-layer-eagle"),
        ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm NGRAM"),
        ("speculative_eagle_topk", 4, "--speculative-eagle-topk 4"),
    ],
)
def test_one_sentence_names_option_value_and_way_back(arguments, name, bad, option):
    (sentence,) = refusals(arguments(**{name: bad}))
    assert sentence.startswith(f"nsa_backend does not serve {option}: ")
    assert "NSA_BACKEND_DISABLE=1" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": 3},
        {"kv_cache_dtype": "fp8_e4m3", adapter.DECODE_ATTRIBUTE: "flashmla_kv", adapter.PREFILL_ATTRIBUTE: "flashmla_auto"},
    ],
)
def test_drafts_and_an_fp8_cache_are_served(arguments, options):
    assert refusals(arguments(**options)) == []


def test_rocm_is_refused(arguments, monkeypatch):
    monkeypatch.setattr(adapter, "is_rocm", lambda: True)
    (sentence,) = refusals(arguments())
    assert "ROCm" in sentence


def test_server_stops_in_its_argument_check_with_every_refusal(resolve):
    options = (adapter.DECODE_OPTION, "tilelang", adapter.PREFILL_OPTION, "tilelang")
    with pytest.raises(ValueError, match=rf"(?s){options[0]} tilelang.*\n.*{options[2]} tilelang"):
        resolve("--attention-backend", adapter.BACKEND_NAMES[0], *options).check_server_args()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.attribute in FIELDS], ids=lambda rule: rule.attribute)
def test_a_refusal_names_an_option_that_the_parser_knows(rule):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert rule.option in parser._option_string_actions


def test_every_rule_that_holds_everywhere_reads_an_attribute_of_the_release():
    assert {rule.attribute for rule in RULES if rule.everywhere} <= FIELDS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.attribute)
def test_a_served_value_is_served(arguments, rule):
    for value in rule.served:
        assert refusals(arguments(**{rule.attribute: value})) == []


def test_a_model_like_deepseek_v32_is_served():
    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, qk_rope_head_dim=64)
    assert adapter.is_sparse_model(config)
    assert adapter.index_topk(config) == 2048
    for speculative in (False, True):
        assert adapter.model_problem(config, speculative, False) is None


def test_whole_rounds_in_one_graph(arguments, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    problem = round_graph_problem()
    assert refusals(arguments(speculative_algorithm="EAGLE")) == ([problem] if problem else [])


def test_sampled_rounds_without_rounds_in_one_graph(arguments, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_SAMPLED_ROUNDS", "1")
    of_release = refusals(arguments(speculative_algorithm="EAGLE"))
    problem = round_graph_problem("NSA_BACKEND_SAMPLED_ROUNDS")
    assert of_release == ([problem] if problem else [])
    assert all(sentence.startswith("NSA_BACKEND_SAMPLED_ROUNDS=1 is served on SGLang") for sentence in of_release)
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "0")
    *before, sentence = refusals(arguments(speculative_algorithm="EAGLE"))
    assert before == of_release
    assert sentence.endswith("NSA_BACKEND_ROUND_GRAPH=0 leaves three: unset one")


@pytest.mark.parametrize(
    ("drafts", "device_sm", "reasons"),
    [
        (4, 90, []),
        (0, 90, []),
        (3, 90, ["there are 3: pass an even --speculative-num-draft-tokens, or unset it"]),
        (4, 100, ["is for Hopper (SM90) and this device is SM100: unset it"]),
    ],
)
def test_logits_of_pairs(arguments, monkeypatch, drafts, device_sm, reasons):
    monkeypatch.setenv("NSA_BACKEND_PAIRED_LOGITS", "1")
    monkeypatch.setattr(adapter, "device_sm", lambda device: device_sm)
    of_release = [] if "dsa" in adapter.BACKEND_NAMES else [f"SGLang {installed()} has none as it is set up: unset it"]
    found = refusals(arguments(speculative_num_draft_tokens=drafts))
    assert len(found) == len(of_release + reasons)
    assert all(sentence.endswith(reason) for sentence, reason in zip(found, of_release + reasons, strict=True))


def test_a_front_in_two_launches(arguments, monkeypatch):
    """Who did not ask for it reads of no switch, and is served."""
    monkeypatch.delenv("NSA_BACKEND_LAYER_FRONT", raising=False)
    assert refusals(arguments(enable_lora=True)) == []
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "1")
    (sentence,) = refusals(arguments(enable_lora=True))
    reason = layer_front_problem() or "--enable-lora keeps SGLang's front: drop --enable-lora to have ours"
    assert sentence == f"NSA_BACKEND_LAYER_FRONT=1: {reason}"


@pytest.mark.parametrize(
    ("switch", "served_on"),
    [("NSA_BACKEND_DIVIDED_INDEXER", DIVIDED_INDEXERS), ("NSA_BACKEND_FEW_EXPERTS", FEW_EXPERTS)],
)
def test_what_was_measured_on_one_release_alone(arguments, monkeypatch, switch, served_on):
    monkeypatch.setenv(switch, "1")
    found = refusals(arguments(tp_size=2))
    if installed() in served_on:
        assert found == []
    else:
        (sentence,) = found
        assert sentence.startswith(f"{switch}=1: ")
        assert sentence.endswith(f" on SGLang 0.5.23, and {installed()} is installed: unset it")


@pytest.mark.skipif(installed() not in FEW_EXPERTS, reason="the release is refused before the GPU")
def test_launches_of_experts_are_of_hopper(arguments, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_FEW_EXPERTS", "1")
    monkeypatch.setattr(adapter, "device_sm", lambda device: 100)
    (sentence,) = refusals(arguments())
    what = "experts of few tokens are served on Hopper (SM90)"
    assert sentence == f"NSA_BACKEND_FEW_EXPERTS=1: {what} and this device is SM100: unset it"


def test_the_warm_up_of_rounds_in_one_graph(arguments, monkeypatch):
    monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH", raising=False)
    named = arguments(warmups=f"voice_chat,{ROUND_WARM_UP}")
    three = f"--warmups {ROUND_WARM_UP} captures rounds in one graph, and on SGLang {installed()} they are three: drop it"
    of_the_release = [] if round_graph_problem() is None else [three]
    assert refusals(named) == of_the_release
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "0")
    of_the_switch = f"--warmups {ROUND_WARM_UP} captures rounds in one graph, and NSA_BACKEND_ROUND_GRAPH=0 leaves three: "
    assert refusals(named) == (of_the_release or [of_the_switch + "drop one of the two"])
    assert refusals(arguments(warmups="voice_chat")) == []


@pytest.mark.skipif("speculative_draft_kv_cache_dtype" not in FIELDS, reason="the release gives drafts the target's dtype")
@pytest.mark.parametrize(
    ("target", "drafts", "served"),
    [
        ("bfloat16", "bf16", True),
        ("bfloat16", "auto", True),
        ("fp8_e4m3", "fp8_e4m3", True),
        ("bfloat16", "fp8_e4m3", False),
        ("fp8_e4m3", "bfloat16", False),
        ("fp8_e4m3", "auto", False),
    ],
)
def test_drafts_have_the_kv_cache_dtype_of_the_target(resolve, target, drafts, served):
    """Refused before weights load, with advice that serves: both implementations read one dtype."""
    decode, prefill = ("flashmla_kv",) * 2 if target == "fp8_e4m3" else ("fa3", "flashmla_sparse")
    words = (*OWN, "--kv-cache-dtype", target, adapter.DECODE_OPTION, decode)
    words += (adapter.PREFILL_OPTION, prefill, *SPECULATIVE)
    asked = "--speculative-draft-kv-cache-dtype"
    resolve(*words).check_server_args()
    if served:
        resolve(*words, asked, drafts).check_server_args()
        return
    with pytest.raises(ValueError, match=f"does not serve {asked} {drafts} beside --kv-cache-dtype {target}: .*drop the first"):
        resolve(*words, asked, drafts).check_server_args()


@pytest.mark.skipif("enable_pd_role_switch" not in FIELDS, reason="the release has no such option")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_of_a_pair_change_roles_without_drafts_alone(resolve, role):
    """SGLang itself refuses drafts there, so none is lost when a server that keeps no draft KV becomes a decode server."""
    words = (*OWN, "--disaggregation-mode", role, "--enable-pd-role-switch")
    resolve(*words).check_server_args()
    with pytest.raises(ValueError, match=r"does not rebuild role-specific state .*speculative decoding"):
        resolve(*words, "--speculative-algorithm", "EAGLE")
