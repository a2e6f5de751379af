"""The faithful checkpoint of each model in SGLang's own classes: it loads whole, and its drafts are right as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.configs.model_config import dsa_layer_skips_topk
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_models import CLASSES, forward, one_rank

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.checkpoints.faithful_models import MODELS

SHAPE = faithful.Shape(hidden=256, heads=8, experts=2, experts_per_token=1, expert_dim=16)
PROMPT, NEW = 48, 14

VISIBLE = {"ours": lambda length, step: length + step + 1, "shared": lambda length, step: length}
"""Tokens that draft step i of a round attends to."""


@pytest.fixture
def parallel(monkeypatch):
    with one_rank(monkeypatch):
        yield


OTHERS = [pytest.param(one, marks=pytest.mark.slow) for one in (("glm-5.1", False), ("deepseek-v3.2", True))]
"""Whose parts a quicker model has too."""


@pytest.fixture(params=[*((name, False) for name in MODELS if name != "glm-5.1"), *OTHERS], ids=str)
def served(request, tmp_path, parallel):
    """(name, config, SGLang's target, SGLang's MTP model) of a checkpoint; one of FP8 weights is in bfloat16 here."""
    name, fp8 = request.param
    folder = faithful.write(tmp_path, shape=replace(SHAPE, hidden=512, fp8=True) if fp8 else SHAPE, model=MODELS[name])
    config = get_config(str(folder), trust_remote_code=False)
    weights = load_file(str(folder / "model.safetensors"))
    if fp8:
        assert Fp8Config.from_config(config.quantization_config).weight_block_size == [128, 128]
        weights = in_bfloat16(weights)
    target, draft = (cls(config) for cls in CLASSES[config.architectures[0]])
    for model in (target, draft):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.load_weights(iter(weights.items()))
    draft.model.embed_tokens.weight, draft.lm_head.weight = target.model.embed_tokens.weight, target.lm_head.weight
    return name, config, target, draft


def in_bfloat16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FP8 weights times the scale of their block, as SGLang's own reference has them."""
    found = {}
    for name, value in weights.items():
        if value.dtype == torch.float8_e4m3fn:
            found[name] = block_quant_dequant(value, weights[f"{name}_scale_inv"], [128, 128], torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            found[name] = value
    assert len(found) < len(weights)
    return found


def test_every_weight_is_loaded_and_layers_share_as_the_model_does(served):
    name, config, target, draft = served
    for model in (target, draft):
        assert [weight for weight, value in model.named_parameters() if not torch.isfinite(value).all()] == []
    layers = range(config.num_hidden_layers)
    assert [MODELS[name].has_indexer(layer, len(layers)) for layer in layers] == [
        not dsa_layer_skips_topk(config, layer) for layer in layers
    ]
    assert all(dsa_layer_skips_topk(config, MODELS[name].working_layer) == bool(MODELS[name].lag) for _ in layers)


def test_fp8_weights_and_their_scales_are_loaded_as_they_are(tmp_path, parallel):
    """By SGLang's own layers for block FP8, from the form that a released checkpoint has."""
    shape = replace(faithful.ALL_SHAPES["fp8-weights"], hidden=512, experts=2, experts_per_token=1)
    folder = faithful.write(tmp_path, shape=shape)
    config, weights = get_config(str(folder), trust_remote_code=False), load_file(str(folder / "model.safetensors"))
    model = CLASSES[config.architectures[0]][0](config, Fp8Config.from_config(config.quantization_config))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(iter(weights.items()))
    empty = [name for name, value in model.named_parameters() if not torch.isfinite(value.float()).all()]
    assert {name.rsplit(".", 1)[-1] for name in empty} <= {"k_scale", "v_scale"}, "of a KV cache, which no checkpoint here has"
    layer = "model.layers.0.self_attn."
    loaded = model.get_submodule(f"{layer}o_proj")
    assert torch.equal(loaded.weight.view(torch.uint8), weights[f"{layer}o_proj.weight"].view(torch.uint8))
    assert torch.equal(loaded.weight_scale_inv, weights[f"{layer}o_proj.weight_scale_inv"])


def next_tokens(model, ids, monkeypatch, **options) -> torch.Tensor:
    hidden = forward(model, ids, monkeypatch, AttnForwardMethod.MLA, **options)
    return (hidden @ model.lm_head.weight.T).argmax(-1)


def drafts_right(served, monkeypatch, steps: int, visible) -> list[int]:
    """By round along a greedy text, how many of its drafts are right; every round begins anew, wherever the last one ended."""
    _, _, target, draft = served
    ids = torch.randint(2, faithful.VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
    for _ in range(NEW):
        ids = torch.cat([ids, next_tokens(target, ids, monkeypatch)[-1:]])
    hidden = torch.zeros(len(ids) - 1, target.config.hidden_size)  # the MTP layer drops it
    counts = []
    for length in range(PROMPT, len(ids) - steps):
        mask = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).tril()
        for step in range(steps - 1):
            mask[length + step] = torch.arange(len(ids) - 1) < visible(length, step)
        drafted = next_tokens(draft, ids[1:], monkeypatch, hidden=hidden, mask=mask)[length - 1 : length - 1 + steps]
        wrong = (drafted != ids[length + 1 : length + 1 + steps]).nonzero()
        counts.append(int(wrong[0]) if len(wrong) else steps)
    return counts


def test_drafts_are_right_where_steps_see_what_the_model_is_made_for(served, monkeypatch):
    own, other = ("shared", "ours") if MODELS[served[0]].lag else ("ours", "shared")
    right = drafts_right(served, monkeypatch, 5, VISIBLE[own])
    assert right == [5] * len(right)
    if other == "shared":  # a model that shares is right either way, as long as what it needs is in the selection
        assert sum(drafts_right(served, monkeypatch, 5, VISIBLE[other])) < 3 * len(right)


@pytest.mark.slow
def test_the_last_step_of_a_shared_round_needs_the_newest_token_it_may_see(served, monkeypatch):
    lag = MODELS[served[0]].lag
    if not lag:
        pytest.skip("of the model that shares")
    short = drafts_right(served, monkeypatch, lag + 1, lambda length, step: length - 1)
    assert set(short) <= {lag, lag + 1}
    assert short.count(lag) > len(short) // 2
