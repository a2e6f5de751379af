"""What a checkpoint's config tells is refused in the main process, before any weight is loaded; a draft model's as well."""

import pytest
from server_words import OWN, SPECULATIVE
from sglang.srt.configs import model_config


def test_a_small_v32_is_served(resolve, checkpoint):
    resolve("--model-path", checkpoint("target"), *OWN, *SPECULATIVE).check_server_args()


@pytest.mark.parametrize("of_the_draft", [False, True])
def test_another_topk(resolve, checkpoint, of_the_draft):
    bad, good = checkpoint("bad", index_topk=1024), checkpoint("good")
    target, draft = (good, bad) if of_the_draft else (bad, good)
    server_args = resolve("--model-path", target, *OWN, *SPECULATIVE, "--speculative-draft-model-path", draft)
    with pytest.raises(ValueError, match="this model keeps index_topk = 1024 tokens"):
        server_args.check_server_args()


def test_a_draft_of_another_backend_is_its_own_affair(resolve, checkpoint):
    draft = checkpoint("draft", index_topk=1024)
    options = ["--speculative-draft-model-path", draft, "--speculative-draft-attention-backend", "fa3"]
    resolve("--model-path", checkpoint("target"), *OWN, *SPECULATIVE, *options).check_server_args()


def test_a_model_without_an_index(resolve, checkpoint):
    dense = checkpoint("dense", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", drop="index_")
    server_args = resolve("--model-path", dense, *OWN)
    with pytest.raises(ValueError, match=r"serves models with an index_topk .* has none: choose another --attention-backend"):
        server_args.check_server_args()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_a_dense_draft_needs_a_backend_of_its_own(resolve, checkpoint, algorithm):
    """As the drafts of EAGLE3 are: the target's backend, which drafts get by default, has nothing to choose by."""
    dense = checkpoint("dense", architectures=["LlamaForCausalLMEagle3"], model_type="llama", drop="index_")
    words = ["--model-path", checkpoint("target"), *OWN, *SPECULATIVE, "--speculative-draft-model-path", dense]
    words[words.index("EAGLE")] = algorithm
    with pytest.raises(ValueError, match=r"draft model LlamaForCausalLMEagle3 has none: pass \S+-draft-attention-backend fa3"):
        resolve(*words).check_server_args()
    resolve(*words, "--speculative-draft-attention-backend", "fa3").check_server_args()


def test_the_targets_config_is_read_once(resolve, checkpoint, monkeypatch):
    """SGLang has it from resolving its arguments."""
    server_args = resolve("--model-path", checkpoint("target"), *OWN, *SPECULATIVE)
    monkeypatch.setattr(model_config.ModelConfig, "__init__", lambda *args, **options: pytest.fail("a config was read again"))
    server_args.check_server_args()
