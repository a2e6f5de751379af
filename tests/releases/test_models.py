"""Every sparse model of SGLang by its own configuration class: served, or refused from the config with one true sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_runner import build
from models import BUILDERS, SHARES, installed_models

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.layer_sharing import layers_that_share
from nsa_backend.model_check import check_model
from nsa_backend.registration import create_backend
from nsa_backend.releases import installed

MODELS = installed_models()
NEWEST = "Hunyuan V4" in MODELS
OF_DSA = adapter.BACKEND_NAMES[0] == "dsa"


def sentence(name: str, *, speculative: bool = False, dequantised_prefill: bool = False) -> str:
    """Of the refusal; empty where it is served."""
    try:
        check_model(MODELS[name], speculative=speculative, on_gpu=True, dequantised_prefill=dequantised_prefill)
    except ValueError as refusal:
        return str(refusal)
    return ""


def test_the_classes_of_the_release_are_here():
    assert set(MODELS) >= {"GLM-5, GLM-5.1", "GLM-5.2, GLM-5.3", "LongCat-Flash", "Mistral Large 3", "Pixtral"}
    assert not NEWEST or set(MODELS) == set(BUILDERS)


@pytest.mark.parametrize("name", [n for n in ("DeepSeek-V3.2", "GLM-5, GLM-5.1") if n in MODELS])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("dequantised_prefill", [False, True])
def test_served_throughout(name, speculative, dequantised_prefill):
    assert sentence(name, speculative=speculative, dequantised_prefill=dequantised_prefill) == ""


def test_shared_selections_are_served_where_sglang_has_them():
    """Of draft steps and of layers; releases that read neither would run other layers' indexers than the checkpoint has."""
    name = "GLM-5.2, GLM-5.3"
    if not OF_DSA:
        assert f"a pattern that SGLang {installed()} does not read" in sentence(name)
        assert "from 0.5.17 on" in sentence(name, speculative=True)
        return
    assert sentence(name) == sentence(name, speculative=True) == sentence(name, dequantised_prefill=True) == ""
    refusal = sentence(name, speculative=True, dequantised_prefill=True)
    assert (refusal == "") == (installed() == "0.5.23")
    if refusal:
        assert "pass --dsa-prefill-backend flashmla_kv" in refusal


@pytest.mark.skipif(not OF_DSA, reason="reads no pattern")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 4},
        SHARES,
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSFSSS"},
    ],
)
def test_a_pattern_of_layers_is_read_as_sglang_reads_it(fields):
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"], num_hidden_layers=12, index_topk=2048, **fields)
    assert layers_that_share(config) == [dsa_layer_skips_topk(config, layer) for layer in range(12)]
    assert adapter.model_problem(config, True, False) is None


def test_a_pattern_that_sglang_reads_otherwise_is_refused():
    types = ["full", "full", "shared", "shared"]
    config = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"], num_hidden_layers=4, index_topk=2048, indexer_types=types)
    read = NEWEST  # older releases know no indexer_types
    assert (adapter.model_problem(config, False, False) is None) == read


def shared_by(pattern: str | None, types: list[str] | None) -> str | None:
    """What is said of a GLM-5 of four layers; transformers gives it the types, a command line the pattern."""
    fields = {"num_hidden_layers": 4, "index_topk": 2048, "index_topk_pattern": pattern, "indexer_types": types}
    return adapter.model_problem(SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"], **fields), False, False)


def test_a_pattern_of_the_command_line_may_share_what_the_checkpoint_does_not():
    """--json-model-override-args comes after transformers' class has called every layer full: a release goes by either."""
    full = ["full"] * 4
    assert shared_by("FFSS", full) is shared_by("FFSS", None) is shared_by(None, full) is None


@pytest.mark.skipif(not OF_DSA, reason="reads no pattern of a config of transformers")
@pytest.mark.parametrize(("override", "shares"), [({}, not NEWEST), ({"indexer_types": None}, True)])
def test_which_releases_go_by_it(override, shares):
    """Should 0.5.23 mend it, docs/commands.md and docs/host_defects.md can say less."""
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = BUILDERS["GLM-5, GLM-5.1"]()
    config.update({"index_topk_pattern": "FS" * 39} | override)  # what SGLang does with --json-model-override-args
    assert [dsa_layer_skips_topk(config, layer) for layer in range(4)] == [False, shares, False, shares]
    assert adapter.model_problem(config, True, False) is None


@pytest.mark.skipif(NEWEST, reason="goes by the types, which are the checkpoint's")
def test_a_pattern_may_not_let_a_layer_select_that_has_no_indexer():
    problem = f"a pattern that SGLang {installed()} does not read"
    assert problem in shared_by("FFFS", ["full", "full", "shared", "shared"])
    assert shared_by("FSSS", ["full", "full", "shared", "shared"]) is None


def test_selections_that_travel_as_positions_are_never_rows_of_dequantised_kv():
    """On a server of a pair, whichever side turns them into slots."""
    config = MODELS["GLM-5.2, GLM-5.3"]
    if OF_DSA:
        check_model(config, speculative=True, on_gpu=True, dequantised_prefill=True, disaggregated=True)


@pytest.mark.skipif(not OF_DSA or NEWEST, reason="tests/releases/test_dsa_disaggregation.py has it")
def test_both_servers_of_a_pair_select_positions_for_drafts_there():
    """Which is why 0.5.17 need not turn rows of a dequantised copy into slots."""
    from sglang.srt.layers.attention.dsa.utils import should_use_dsa_fused_topk

    fused = {
        mode: should_use_dsa_fused_topk(SimpleNamespace(disaggregation_mode=mode), True)
        for mode in ("prefill", "decode", "null")
    }
    assert fused == {"prefill": False, "decode": False, "null": True}


REFUSED = {
    "GLM-5.3-Flash": "its indexer pools keys",
    "dots.note": "a sparse backend of its own",
    "Mistral Large 3": "scaled by position",
    "Pixtral": "and PixtralForConditionalGeneration has none",
    "DeepSeek-V3": "and DeepseekV3ForCausalLM has none",
}


@pytest.mark.parametrize("name", [name for name in REFUSED if name in MODELS])
def test_refused_whatever_is_asked(name):
    assert REFUSED[name] in sentence(name)
    assert REFUSED[name] in sentence(name, speculative=True)


@pytest.mark.skipif(not OF_DSA, reason="SGLang has no sparse attention for it")
def test_longcat_without_drafts():
    assert sentence("LongCat-Flash") == ""
    assert "MTP layer" in sentence("LongCat-Flash", speculative=True)


@pytest.mark.skipif(not OF_DSA, reason="SGLang has no sparse attention for it")
def test_longcats_mtp_layer_still_takes_attention_for_a_tensor():
    """DeepSeek's attention gives (output, selection) of sparse models. Should SGLang mend it, the refusal can go."""
    from importlib.util import find_spec
    from pathlib import Path

    source = Path(find_spec("sglang.srt.models.longcat_flash_nextn").origin).read_text()
    assert "hidden_states = self.self_attn(" in source
    assert "tuple" not in source


@pytest.mark.skipif(not NEWEST, reason="the class is younger than this release")
def test_sinks_are_served_on_bfloat16():
    assert sentence("Hunyuan V4") == sentence("Hunyuan V4", speculative=True) == ""
    assert "pass --kv-cache-dtype bfloat16" in sentence("Hunyuan V4", dequantised_prefill=True)


def test_a_kv_cache_of_another_width(monkeypatch):
    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, kv_lora_rank=512, qk_rope_head_dim=128)
    with pytest.raises(ValueError, match="512 latent and 128 RoPE values a token, and the kernels are built for 512 and 64"):
        check_model(config, speculative=False, on_gpu=True)
    check_model(config, speculative=False, on_gpu=False)


def runner_of(config: Any, tp_size: int, num_steps: int) -> SimpleNamespace:
    """A CPU runner of a rank's share of the model."""
    runner = build(index_topk=config.index_topk, num_steps=num_steps)
    runner.model_config.hf_config = runner.model_config.hf_text_config = config
    sizes = {
        "num_attention_heads": config.num_attention_heads // tp_size,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
    }
    vars(runner.model_config).update(sizes)
    return runner


@pytest.mark.parametrize("name", [name for name in MODELS if sentence(name) == ""])
@pytest.mark.parametrize("tp_size", [1, 8])
def test_the_absorbed_attention_of_a_served_model(name, tp_size):
    """The backend at the model's own sizes, against softmax over the chosen slots, sinks included."""
    config = MODELS[name]
    drafts = sentence(name, speculative=True) == ""
    backend = create_backend(runner_of(config, tp_size, num_steps=3 if drafts else 0))
    attention = backend.config.attention
    heads, rows, width = config.num_attention_heads // tp_size, 3, config.kv_lora_rank + config.qk_rope_head_dim
    assert (attention.num_heads, attention.latent_dim, attention.rope_dim) == (heads, 512, 64)
    assert attention.nope_dim == config.qk_nope_head_dim
    generator = torch.Generator().manual_seed(heads)
    kv = torch.randn(64, 1, width, generator=generator)
    q = torch.randn(rows, heads, width, generator=generator)
    slots = torch.stack([torch.randperm(64, generator=generator)[:20] for _ in range(rows)])
    sink = torch.randn(heads, generator=generator) if attention.sinks else None
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    inputs = SimpleNamespace(
        q_nope=q[..., :512], q_rope=q[..., 512:], kv_cache=kv, sm_scale=scale, logit_cap=0.0, attn_sink=sink,
        topk_slots=torch.nn.functional.pad(slots, (0, 5), value=-1).int(),
    )  # fmt: skip
    scores = scale * torch.einsum("rhd,rkd->rhk", q, kv[slots][:, :, 0])
    weights = scores.exp()
    total = weights.sum(-1) + (0 if sink is None else sink.exp())
    expected = torch.einsum("rhk,rkd->rhd", weights / total[..., None], kv[slots][:, :, 0, :512])
    torch.testing.assert_close(backend.decode_attention.forward(inputs), expected, atol=1e-5, rtol=1e-5)
