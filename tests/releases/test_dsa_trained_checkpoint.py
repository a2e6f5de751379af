"""The trainer's forward against SGLang's own model classes, on the CPU in float32, from the checkpoint that the trainer writes.

SGLang loads it by its own loader and computes all but the attention over the KV cache, which is plain dense attention here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v2 import DeepseekV32ForCausalLM
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_models import forward, one_rank

from nsa_backend.benchmarks.trained import export
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.shape import SHAPES

TOKENS = 48


@pytest.fixture
def parallel(monkeypatch):
    with one_rank(monkeypatch):
        yield


@pytest.fixture
def models(tmp_path, parallel):
    """(the trainer's model, SGLang's target, SGLang's MTP model), all with the weights of one checkpoint."""
    trained = TrainedModel(SHAPES["tiny"], torch.float32)
    trained.initialize(3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # far from what initialization makes indistinguishable
        for parameter in trained.parameters():
            if parameter.ndim > 1:
                parameter *= 5
            else:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    folder = export.write(trained, tmp_path)
    config = get_config(str(folder), trust_remote_code=False)
    target, draft = DeepseekV32ForCausalLM(config), DeepseekV3ForCausalLMNextN(config)
    for model in (target, draft):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.load_weights(iter(load_file(str(folder / "model.safetensors")).items()))
    draft.model.embed_tokens.weight, draft.lm_head.weight = target.model.embed_tokens.weight, target.lm_head.weight
    return export.load(folder, "cpu", torch.float32), target, draft


def test_every_weight_is_loaded(models):
    _, target, draft = models
    for model in (target, draft):
        assert [name for name, value in model.named_parameters() if not torch.isfinite(value).all()] == []


@pytest.mark.parametrize("method", [AttnForwardMethod.MHA, AttnForwardMethod.MLA], ids=["prefill", "absorbed"])
def test_target_and_mtp_layer_compute_what_sglang_computes(models, monkeypatch, method):
    trained, target, draft = models
    ids = torch.randint(0, trained.shape.vocab, (TOKENS + 1,), generator=torch.Generator().manual_seed(5))
    ours = trained.hidden(ids[None, :-1])
    theirs = forward(target, ids[:-1], monkeypatch, method)
    torch.testing.assert_close(ours[0], theirs, atol=2e-5, rtol=2e-5)
    drafted = forward(draft, ids[1:], monkeypatch, method, hidden=theirs)
    torch.testing.assert_close(trained.mtp_hidden(ids[None, 1:], ours)[0], drafted, atol=2e-5, rtol=2e-5)


def test_index_scores_are_what_sglang_computes(models, monkeypatch):
    """But for the Hadamard rotation of both sides, which changes no product, and FP8."""
    trained, target, draft = models
    monkeypatch.setattr(dsa_indexer, "rotate_activation", lambda x: x)
    generator, rows = torch.Generator().manual_seed(6), torch.arange(TOKENS)
    for attention, layer in (
        (target.model.layers[1].self_attn, trained.layers[1]),
        (draft.model.decoder.self_attn, trained.mtp),
    ):
        x = torch.randn(TOKENS, trained.shape.hidden, generator=generator).bfloat16().float()
        latent = layer.self_attn.q_a_layernorm(layer.self_attn.q_a_proj(x))
        theirs = attention.indexer
        with torch.no_grad():
            q, k, *_ = theirs._get_q_k_bf16(latent, x, rows, False, SimpleNamespace(attn_cp_metadata=None))
            gates = (x @ theirs.weights_proj.weight.float().T) * theirs.n_heads**-0.5 * theirs.softmax_scale
            expected = torch.einsum("qhk,qh->qk", F.relu(torch.einsum("qhd,kd->qhk", q, k)), gates)
        scores = layer.self_attn.indexer.scores(x[None], latent[None], trained.rope(TOKENS), rows)[0]
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
