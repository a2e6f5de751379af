"""Ranks of released models in SGLang's own classes: sizes are those of the released files, and rows go to all experts."""

from __future__ import annotations

import json
import math
import runpy
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.topk import biased_grouped_topk_impl
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.rotary_embedding import rope_variant
from sglang.srt.model_loader import loader
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_models import CLASSES, forward, one_rank

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.servers import rank_server
from nsa_backend.releases import CONTEXT_RANKS, installed

FILES_OF_V3 = 688_586_727_753
"""Bytes of deepseek-ai/DeepSeek-V3's safetensors, headers included: V3.2 without its indexers."""
HEADER = 200  # bytes of a tensor's entry, at most
GLM_PARAMETERS = 754e9
"""Of GLM-5.1 and its MTP layer, as its model card has them, rounded; the MTP layer's copies of both ends of the model apart."""
PADDED = 64  # SGLang rounds a vocabulary up


def released_bytes(config: dict, indexers: bool) -> tuple[int, int]:
    """(bytes, number) of all tensors of a released checkpoint, scales included."""
    found = [(name, shape, small) for name, shape, small in ranks.tensors(config) if indexers or ".indexer." not in name]
    size = sum(
        math.prod(shape) + 4 * math.prod(ranks.scales(shape))
        if small
        else (4 if "correction" in name else 2) * math.prod(shape)
        for name, shape, small in found
    )
    return size, sum(1 + small for *_, small in found)


def test_the_formula_of_weights_gives_the_size_of_the_released_files():
    size, count = released_bytes(ranks.RANKS["v3.2-tp8"].released, indexers=False)
    assert 0 < FILES_OF_V3 - size < HEADER * count
    glm = ranks.RANKS["glm-5.1-tp8"].released
    ends = 2 * glm["vocab_size"] * glm["hidden_size"]
    assert sum(math.prod(shape) for _, shape, _ in ranks.tensors(glm)) - ends == pytest.approx(GLM_PARAMETERS, rel=1e-3)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Returns a function of a config to (SGLang's config, target, MTP model), quantized as the config says."""
    monkeypatch.setattr(rope_variant, "get_device", lambda *device: "cpu")
    before = torch.get_default_dtype()

    def built(config: dict, device: str, dtype: torch.dtype):
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"  # SGLang remembers what it read from a path
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        parsed = get_config(str(folder), trust_remote_code=False)
        quantized = config.get("quantization_config")
        torch.set_default_dtype(dtype)
        with torch.device(device):
            return parsed, *(
                of_model(parsed, quant_config=quantized and Fp8Config.from_config(quantized))
                for of_model in CLASSES[config["architectures"][0]]
            )

    with one_rank(monkeypatch):
        yield built
    torch.set_default_dtype(before)


def sums(tensors) -> dict[str, list[int]]:
    """Values of 8 bits and of more, by layer; what is in no layer by its name. SGLang fuses matrices of a layer: sums stay."""
    found: dict[str, list[int]] = {}
    for name, shape, small in tensors:
        parts = name.split(".")
        key = parts[parts.index("layers") + 1] if "layers" in parts else name
        found.setdefault(key, [0, 0])[not small] += math.prod(shape)
    return found


def expected(config: dict) -> dict[str, list[int]]:
    rows = -(-config["vocab_size"] // PADDED) * PADDED
    tall = [
        (name, (rows, *shape[1:]) if shape[0] == config["vocab_size"] else shape, s) for name, shape, s in ranks.tensors(config)
    ]
    return sums(tall)


@pytest.mark.parametrize("name", ranks.RANKS)
def test_a_rank_has_the_weights_that_sglang_makes_room_for(name, models):
    config = ranks.RANKS[name].config
    _, target, draft = models(config, "meta", torch.bfloat16)
    made = {}
    for model, layer in ((target, None), (draft, str(config["num_hidden_layers"]))):
        kept = [(n, p.shape, p.element_size() == 1) for n, p in model.named_parameters() if "scale" not in n.rsplit(".", 1)[-1]]
        made |= sums((f"layers.{layer}" if layer else n, shape, small) for n, shape, small in kept)
    assert made == expected(config)
    scales = [p.shape.numel() for m in (target, draft) for n, p in m.named_parameters() if n.endswith("scale_inv")]
    fused = sum(math.prod(ranks.scales(shape)) for _, shape, small in ranks.tensors(config) if small)
    assert sum(scales) == pytest.approx(fused, rel=1e-3)  # 576 rows of latent keys end in half a block


@pytest.mark.parametrize("name", ranks.RANKS)
def test_sglang_parses_a_rank_as_the_model_it_is_of(name, tmp_path):
    folder = ranks.write(tmp_path, name)
    assert ranks.rank_in(folder) == name
    found = ModelConfig(str(folder))
    assert found.context_len == ranks.RANKS[name].released["max_position_embeddings"]
    assert getattr(found.hf_config, "index_share_for_mtp_iteration", False) == (name == "glm-5.2-tp8")


OF_TENSOR_PARALLEL = [name for name, rank in ranks.RANKS.items() if rank.deployments == ranks.TOGETHER]


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", OF_TENSOR_PARALLEL)
def test_each_of_several_ranks_has_what_one_has(name, count, tmp_path):
    """Tensor parallel divides their sizes, by whole heads and by whole blocks of 8-bit weights; the indexer stays whole."""
    released, one = ranks.RANKS[name].released, ranks.RANKS[name].config
    found = ModelConfig(str(ranks.write(tmp_path, name, count)))
    assert ranks.rank_in(tmp_path) == name
    assert found.num_attention_heads == count * one["num_attention_heads"]
    assert found.hf_config.vocab_size == count * one["vocab_size"]
    assert found.hf_config.index_n_heads == released["index_n_heads"]
    assert found.hf_config.moe_intermediate_size // count == one["moe_intermediate_size"]
    assert one["moe_intermediate_size"] % ranks.BLOCK == one["intermediate_size"] % ranks.BLOCK == 0
    if count == ranks.RANKS_OF_A_MODEL:
        assert ranks.RANKS[name].together(count) == released | {"eos_token_id": 1}


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", ["v3.2-dp8", "glm-5.1-dp8"])
def test_ranks_of_dp_attention_divide_experts_alone(name, count, tmp_path):
    rank = ranks.RANKS[name]
    found = ModelConfig(str(ranks.write(tmp_path, name, count)))
    assert found.num_attention_heads == rank.released["num_attention_heads"]
    assert found.hf_config.n_routed_experts // count == rank.config["n_routed_experts"]
    if count == ranks.RANKS_OF_A_MODEL:
        assert rank.together(count) == rank.released | {"eos_token_id": 1}


@pytest.mark.parametrize("name", OF_TENSOR_PARALLEL)
def test_a_gpu_of_two_has_the_weights_of_one_rank(name, models):
    group = mock.Mock(world_size=2, rank_in_group=0)
    groups = dict.fromkeys(("tp_group", "attn_tp_group", "moe_tp_group"), group)
    with runtime_context.get_parallel().override(tp_size=2, attn_tp_size=2, moe_tp_size=2, **groups):
        _, *both = models(ranks.RANKS[name].together(2), "meta", torch.bfloat16)
    _, *alone = models(ranks.RANKS[name].config, "meta", torch.bfloat16)
    for of_two, of_one in zip(both, alone, strict=True):
        sizes = [
            {n: p.shape for n, p in model.named_parameters() if "embed_tokens" not in n and "head" not in n}
            for model in (of_two, of_one)
        ]
        assert sizes[0] == sizes[1]


@pytest.mark.skipif(installed() not in CONTEXT_RANKS, reason="no other release divides KV of these models")
def test_a_scheduler_counts_tokens_of_requests_and_not_rows_of_a_rank():
    """What `Server.pool_tokens` reads is this number."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = SimpleNamespace(
        max_total_num_tokens=640,
        req_to_token_pool=SimpleNamespace(schedulable_token_capacity=lambda tokens: tokens),
        kv_cache_configurator=SimpleNamespace(
            logical_token_capacity=partial(
                KVCacheConfigurator.logical_token_capacity, SimpleNamespace(is_hybrid_swa=False, loc_space_scale=1)
            )
        ),
    )
    found = []
    for size in (1, 2):
        with runtime_context.get_parallel().override(attn_dcp_size=size):
            found.append(ModelRunner.logical_max_total_num_tokens.fget(runner))
    assert found == [640, 1280]


SMALL = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "moe_intermediate_size": 16, "vocab_size": 512, "q_lora_rank": 64, "quantization_config": None,
}  # fmt: skip
ROWS, CHOSEN = 128, 8


def experts_of_a_batch(model, config, monkeypatch) -> tuple[list[int], torch.Tensor]:
    """How many experts the rows of one forward go to, by layer, and the hidden states that come out."""
    logits = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, args, out, number=number: logits.update({number: out}))
    ids = torch.randint(2, 512, (ROWS,), generator=torch.Generator().manual_seed(3))
    hidden = forward(model, ids, monkeypatch, AttnForwardMethod.MLA)
    counts = []
    for number, scores in logits.items():
        bias = model.model.layers[number].mlp.gate.e_score_correction_bias
        _, chosen = biased_grouped_topk_impl(hidden, scores, bias, CHOSEN, True, config.n_group, config.topk_group)
        counts.append(len(chosen[:, :CHOSEN].unique()))
    return counts, hidden


@pytest.mark.parametrize("name", ["v3.2-tp8", "glm-5.2-tp8"])
def test_rows_of_a_batch_go_to_as_many_experts_as_random_ones(name, models, monkeypatch):
    config, target, _ = models(ranks.RANKS[name].config | SMALL, "cpu", torch.float32)
    rank_server.draw_weights(target)
    loader.post_load_weights(target)
    counts, hidden = experts_of_a_batch(target, config, monkeypatch)
    random = config.n_routed_experts * (1 - (1 - CHOSEN / config.n_routed_experts) ** ROWS)
    assert len(counts) == 1
    assert min(counts) > 0.85 * random
    assert torch.isfinite(hidden).all()
    assert hidden.std(0).min() > 0.05, "rows differ"


def test_weights_of_8_bits_are_neither_zero_nor_infinite_and_differ_by_layer(models):
    sizes = SMALL | {"quantization_config": ranks.RANKS["v3.2-tp8"].config["quantization_config"], "n_routed_experts": 16,
                     "moe_intermediate_size": 128, "intermediate_size": 128, "q_lora_rank": 128}  # fmt: skip
    _, target, draft = models(ranks.RANKS["v3.2-tp8"].config | sizes, "cpu", torch.bfloat16)
    for model in (target, draft):
        rank_server.draw_weights(model)
        eight = {name: value.float() for name, value in model.named_parameters() if value.element_size() == 1}
        assert len(eight) > 5
        for name, value in eight.items():
            assert value.abs().min() >= rank_server.SMALLEST, name
            assert value.abs().max() <= rank_server.LARGEST, name
            assert abs(value.mean()) < 0.1 * value.std(), name
        assert all(torch.isfinite(value.float()).all() for value in model.state_dict().values())
    layers = target.model.layers
    assert not torch.equal(layers[0].self_attn.o_proj.weight.float(), layers[1].self_attn.o_proj.weight.float())
    first = layers[3].mlp.experts.w13_weight.float()
    assert not torch.equal(first[0], first[1])


def test_weights_are_drawn_in_the_processes_of_such_a_server_alone(monkeypatch):
    """A server spawns its scheduler, and the child imports the parent's main module under the name __mp_main__."""
    theirs = loader.initialize_dummy_weights
    monkeypatch.delitem(sys.modules, rank_server.__name__)  # runpy warns of a module that is there
    monkeypatch.setattr(loader, "initialize_dummy_weights", theirs)
    runpy.run_module(rank_server.__name__, run_name="other")
    assert loader.initialize_dummy_weights is theirs
    runpy.run_module(rank_server.__name__, run_name="__mp_main__")
    assert loader.initialize_dummy_weights.__name__ == "draw_weights"
