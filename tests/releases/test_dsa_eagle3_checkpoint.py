"""The EAGLE3 draft of the faithful checkpoint in SGLang's own class: it loads whole, and drafts what the target says next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.models import llama_eagle3
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_v2 import DeepseekV32ForCausalLM
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_models import forward, one_rank

from nsa_backend.benchmarks.checkpoints import eagle3, faithful

SHAPE = faithful.Shape(hidden=1024, heads=8, experts=2, experts_per_token=1, expert_dim=16)
PROMPT, NEW, STEPS = 48, 17, 3


def loaded(cls, folder):
    """SGLang's model of a folder, where every weight that is not loaded is not a number."""
    model = cls(get_config(str(folder), trust_remote_code=False))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(iter(load_file(str(folder / "model.safetensors")).items()))
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(SGLang's target with the layers captured that the draft's config asks for, SGLang's draft model)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target = faithful.write(folder / "target", shape=SHAPE)
    draft = eagle3.write(folder / "draft", target)
    with pytest.MonkeyPatch.context() as patch, one_rank(patch):
        patch.setattr(llama_eagle3, "get_spec", lambda: SimpleNamespace(speculative_draft_window_size=None))
        target, draft = loaded(DeepseekV32ForCausalLM, target), loaded(llama_eagle3.LlamaForCausalLMEagle3, draft)
        target.set_eagle3_layers_to_capture(draft.config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        yield target, draft


def test_every_weight_is_loaded_but_the_embedding_which_is_the_targets(served):
    target, draft = served
    missing = [name for name, value in draft.named_parameters() if not torch.isfinite(value).all()]
    assert missing == ["model.embed_tokens.weight"]
    assert draft.model.fc.in_features == len(target.model.layers_to_capture) * SHAPE.hidden
    assert not draft.load_lm_head_from_target
    assert draft.get_hot_token_id().sort().values.tolist() == list(range(faithful.VOCAB))


def text_of(target, monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A greedy text [tokens] of the target, and what its layers hand over of all but the last [tokens - 1, 2 * hidden]."""
    ids = torch.randint(2, faithful.VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
    for _ in range(NEW):
        hidden, captured = forward(target, ids, monkeypatch, AttnForwardMethod.MLA)
        ids = torch.cat([ids, (hidden[-1:] @ target.lm_head.weight.T).argmax(-1)])
    return ids, captured


def drafts_right(served, ids: torch.Tensor, captured: torch.Tensor, monkeypatch) -> list[int]:
    """By round, how many of its drafts are right. As SGLang steps: hidden states of the target first, then the draft's own."""
    target, draft = served
    draft.model.embed_tokens.weight = target.model.embed_tokens.weight
    counts = []
    for length in range(PROMPT, len(ids) - STEPS):
        hidden, tokens, right = captured[:length], ids[1 : length + 1], 0
        while right < STEPS:
            out, (recurrent,) = forward(draft, tokens, monkeypatch, AttnForwardMethod.MLA, hidden=hidden)
            token = draft.get_hot_token_id()[(out[-1:] @ draft.lm_head.weight.T).argmax(-1)]
            if token != ids[length + 1 + right]:
                break
            right += 1
            rows = hidden if hidden.shape[1] == SHAPE.hidden else draft.model.fc(hidden)
            hidden, tokens = torch.cat([rows, recurrent[-1:]]).detach(), torch.cat([tokens, token])
        counts.append(right)
    return counts


def test_drafts_are_what_the_target_says_next_as_long_as_its_hidden_states_come(served, monkeypatch):
    ids, captured = text_of(served[0], monkeypatch)
    right = drafts_right(served, ids, captured, monkeypatch)
    assert sum(right) > 0.75 * STEPS * len(right)
    of_the_last_layer = captured[:, -SHAPE.hidden :]  # as EAGLE hands over, which no `fc` maps
    for wrong in (torch.zeros_like(captured), of_the_last_layer):
        assert sum(drafts_right(served, ids, wrong, monkeypatch)) < 0.2 * STEPS * len(right)
