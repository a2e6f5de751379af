"""Options that forbid rounds in one graph, typed as a user types them and resolved by SGLang itself.

A release may resolve an option into another one and turn the first off, as 0.5.23 does with --enable-dp-attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_a_script import answers

from nsa_backend.adapters.dsa.rounds.by_release import OneGraph, release
from nsa_backend.adapters.dsa.rounds.served import DP_ATTENTION, NEEDED
from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.servers import server
from nsa_backend.releases import installed

pytestmark = pytest.mark.slow

TWO, EXPERTS = ["--tp-size", "2"], ["--tp-size", "2", "--ep-size", "2"]
DP = [*TWO, "--dp-size", "2", "--enable-dp-attention"]
DIVIDED = ["--dcp-size", "2", "--dsa-prefill-backend", "flashmla_sparse"]
DIVIDED_BY_RANKS = ["--tp-size", "4", "--dp-size", "2", "--enable-dp-attention", *DIVIDED]
WORDS = {
    "another algorithm": ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "."],
    "no overlap": ["--disable-overlap-schedule"],
    "no graphs": ["--disable-cuda-graph"],
    "no decode graphs": ["--disable-decode-cuda-graph"],
    "no padding": ["--disable-cuda-graph-padding"],
    "DP attention": DP,
    "DP attention in four ranks": ["--tp-size", "4", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"],
    "context parallel": [*TWO, "--attn-cp-size", "2"],
    "two-batch overlap": [*DP, "--enable-two-batch-overlap", "--moe-a2a-backend", "deepep"],
    "experts": EXPERTS,
    "experts through DeepEP": [*TWO, "--moe-a2a-backend", "deepep"],
    "DeepEP on one GPU": ["--moe-a2a-backend", "deepep"],
    "DeepEP for the drafts": ["--speculative-moe-a2a-backend", "deepep"],
    "dense layers in a group of their own": [*TWO, "--moe-dense-tp-size", "1"],
    "experts drawn at random": ["--ep-dispatch-algorithm", "dynamic"],
    "PD": ["--disaggregation-mode", "decode"],
    "adaptive": ["--speculative-adaptive"],
    "rejection sampling": ["--speculative-use-rejection-sampling"],
    "released memory": ["--enable-memory-saver"],
    "released memory and experts": [*EXPERTS, "--enable-memory-saver"],
    "balanced experts": [*EXPERTS, "--enable-eplb"],
    "elastic experts": [*EXPERTS, "--elastic-ep-backend", "mooncake"],
    "recorded experts": ["--expert-distribution-recorder-mode", "stat"],
    "returned experts": ["--enable-return-routed-experts"],
    "returned selections": ["--enable-return-indexer-topk"],
    "canary": ["--kv-canary", "log"],
    "dumped tensors": ["--debug-tensor-dump-output-folder", "dumped"],
}
"""What every release with rounds in one graph parses beside EAGLE."""
OF_A_RELEASE = {
    "0.5.17": {"decode graphs of another kind": ["--cuda-graph-backend-decode", "tc_piecewise"]},
    "0.5.23": {
        "DP attention by its new name": [*TWO, "--attn-dp-size", "2"],
        "prefill context parallel": [*TWO, "--enable-prefill-cp", "--cp-strategy", "interleave"],
        "divided KV": [*TWO, *DIVIDED],
        "divided KV with DP attention": DIVIDED_BY_RANKS,
        "divided KV with DP attention and no overlap": [*DIVIDED_BY_RANKS, "--disable-overlap-schedule"],
        "LoRA": ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
        "LoRA by its paths": ["--lora-paths", "adapter=folder"],
        "PD with DP attention": [*DP, "--disaggregation-mode", "decode"],
        "PD with DP attention and experts": [*DP, "--ep-size", "2", "--disaggregation-mode", "decode"],
        "PD with DP attention, logits gathered": [
            *DP,
            "--disaggregation-mode",
            "decode",
            "--no-enable-tp-lm-head-all-to-all",
        ],
    },
}
"""LoRA and both kinds of context parallelism end 0.5.17's start beside EAGLE, by SGLang's own sentence or by ours."""
NOT_BESIDE_EAGLE = {"pp_size", "msprobe_dump_config"}
"""SGLang takes pipeline parallelism with drafts under PD or an environment variable alone, and a file that exists."""


ASKED = {"NAIVE_EAGLE": ["--speculative-algorithm", "NAIVE_EAGLE"], "the switch": []}
"""Two ways to insist on one graph; the second is NSA_BACKEND_ROUND_GRAPH=1."""
PIPELINES = {
    "pipeline": ["--pp-size", "2"],
    "pipeline of a prefill server": ["--pp-size", "2", "--disaggregation-mode", "prefill"],
}
ASK = ", or set NSA_BACKEND_ROUND_GRAPH=1"
RANKS_ALONE = ("DP attention", "DP attention in four ranks", "DP attention by its new name")
BESIDE = {
    **dict.fromkeys(("PD", "PD with DP attention, logits gathered"), "disaggregation_mode"),
    **dict.fromkeys(RANKS_ALONE, "attn_dp_size"),
    "divided KV": "dcp_size",
    "PD with DP attention": "enable_tp_lm_head_all_to_all",
    "experts": "ep_size",
    "released memory": "enable_memory_saver",
}
TOGETHER = {
    "divided KV with DP attention": (("dcp_size", "attn_dp_size"), "drop --dcp-size"),
    "PD with DP attention and experts": (("ep_size", "disaggregation_mode"), "pass --ep-size 1"),
    "released memory and experts": (("enable_memory_saver", "ep_size"), "drop --enable-memory-saver"),
}
BY_DEFAULT = {option for option, when in release().beside.items() if when is OneGraph.BY_DEFAULT}
FREE = {name for name, option in BESIDE.items() if option in BY_DEFAULT}
FREE |= {name for name, (pair, _) in TOGETHER.items() if pair not in release().apart and BY_DEFAULT.issuperset(pair)}
"""What a release's rounds are one graph beside, and another's are not."""
UNSEEN = {name: advice for name, (pair, advice) in TOGETHER.items() if pair in release().apart}
"""The same once they are asked for."""
SWITCH_AND_MORE = {
    "0.5.17": ("balanced experts", "pass --ep-size 1"),
    "0.5.23": ("divided KV with DP attention and no overlap", "drop --dcp-size"),
}
"""Something that would have to change besides what the switch lifts, or besides what looks like it."""
SGLANGS = ("PP + speculative decoding", "Pipeline parallelism is not compatible with overlap schedule, speculative decoding")
"""What it says itself of pipelines with drafts."""


def parsed(folder: Path, commands: list[list[str]], *arguments: str, **environment: str) -> list:
    """What `parsed_commands.py` answers for these words after those of a plain server with one draft."""
    (folder / "config.json").write_text(json.dumps(faithful.config(faithful.SHAPES["faithful"])))
    plain = server.command(folder, 25000, 1)[3:]
    asked = [[*plain, *words] for words in commands]
    return answers("parsed_commands.py", asked, *arguments, folder=folder, **environment)


@pytest.fixture(scope="module")
def changes(tmp_path_factory) -> dict[str, list[str]]:
    """By name, what SGLang's resolved options would have to change for rounds in one graph; and `plain`, with none."""
    words = {"plain": []} | WORDS | OF_A_RELEASE.get(installed(), {})
    found = parsed(tmp_path_factory.mktemp("checkpoint"), list(words.values()))
    return {name: one["against_one_graph"] for name, one in zip(words, found, strict=True)}


def test_a_plain_server_has_them(changes):
    assert changes["plain"] == []
    assert {name: changes[name] for name in FREE} == {name: [] for name in FREE}
    assert {name: changes[name] for name in UNSEEN} == {name: [f"{advice}{ASK}"] for name, advice in UNSEEN.items()}


@pytest.mark.parametrize("name", [name for name in (*WORDS, *OF_A_RELEASE.get(installed(), {})) if name not in FREE])
def test_a_server_with_one_of_these_does_not(changes, name):
    assert changes[name] != []


def test_where_the_switch_would_not_be_enough_it_is_not_spoken_of(changes):
    name, change = SWITCH_AND_MORE[installed()]
    others = changes[name]
    assert change in others
    assert len(others) > 1
    assert not any(change.endswith(ASK) for change in others)


def test_every_rule_was_tried(changes):
    """But where a release does not take the option beside EAGLE, or has another name for it."""
    said = {change.removesuffix(ASK) for of_one in changes.values() for change in of_one}
    left = {rule.attribute for rule in (*NEEDED, *DP_ATTENTION) if rule.advice not in said}
    refused = {"0.5.17": {"attn_dp_size", "dcp_size", "enable_lora", "enable_tp_lm_head_all_to_all"}}
    free = BY_DEFAULT - {first for first, _ in release().apart}
    assert left == NOT_BESIDE_EAGLE | (refused | {"0.5.23": {"enable_dp_attention"}}).get(installed(), set()) | free


@pytest.mark.parametrize("way", ASKED)
def test_who_insists_on_one_graph_gets_a_sentence_instead_of_a_server(tmp_path, way):
    """At the check of the options, before weights load. Some pipelines are refused by SGLang, in its own words."""
    words = {"plain": []} | WORDS | OF_A_RELEASE.get(installed(), {}) | PIPELINES
    del words["another algorithm"]  # typed after NAIVE_EAGLE, it is the one that counts
    environment = {"NSA_BACKEND_ROUND_GRAPH": "1"} if way == "the switch" else {}
    found = parsed(tmp_path, [[*ASKED[way], *given] for given in words.values()], "--refusals", **environment)
    refused = dict(zip(words, found, strict=True))
    served = {"plain", *FREE, *UNSEEN}
    if "PD" in FREE:
        served.add("pipeline of a prefill server")
    assert {name: refused.pop(name) for name in served} == dict.fromkeys(served)
    for name, said in refused.items():
        sentences = ("which NAIVE_EAGLE sets, cannot be served with these options", *(SGLANGS if name in PIPELINES else ()))
        assert said is not None, name
        assert any(sentence in said for sentence in sentences), (name, said)
