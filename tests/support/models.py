"""The sparse models that SGLang knows, by the configuration classes that are installed: what a released checkpoint has on top.

Sizes come from the classes. A field is added where the class has no default for it and a checkpoint brings it along.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

SELECTS = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
SHARES = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True}


def _built(module: str, name: str, architecture: str, **fields: Any) -> Callable[[], Any]:
    def build() -> Any:
        return getattr(import_module(module), name)(architectures=[architecture], **fields)

    return build


def _glm_53_flash() -> Any:
    """SGLang's class around what transformers' has for the text model, which says more about the indexer."""
    text = import_module("transformers").Glm5NextTextConfig().to_dict()
    named = {name: value for name, value in text.items() if name not in ("model_type", "architectures")}
    module = import_module("sglang.srt.configs.glm5_next")
    return module.Glm5NextConfig(text_config=named, architectures=["Glm5NextForConditionalGeneration"])


def _longcat() -> Any:
    """SGLang's class with the RoPE part of transformers', which is that of the released checkpoints."""
    rope = import_module("transformers").LongcatFlashConfig().qk_rope_head_dim
    module = import_module("sglang.srt.configs.longcat_flash")
    fields = SELECTS | {"qk_rope_head_dim": rope, "cli_factor": 2}
    return module.LongcatFlashConfig(architectures=["LongcatFlashForCausalLM"], **fields)


MISTRAL_LARGE_3 = {
    "n_layers": 2, "n_heads": 128, "dim": 7168, "vocab_size": 1024, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000.0, **SELECTS,
    "moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "expert_hidden_dim": 64,
            "first_k_dense_replace": 1, "route_every_n": 1, "routed_scale": 1.0, "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1},
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
}  # fmt: skip
"""params.json as SGLang takes it; the sizes are DeepSeek-V3's, which this model is built like."""


def _mistral(**fields: Any) -> Callable[[], Any]:
    def build() -> Any:
        params = {name: dict(value) if isinstance(value, dict) else value for name, value in MISTRAL_LARGE_3.items()}
        adapt = import_module("sglang.srt.utils.hf_transformers.mistral_utils").adapt_config_dict
        return adapt(params | fields, "mistral-large-3")[1]

    return build


_GLM = ("transformers", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM")
BUILDERS: dict[str, Callable[[], Any]] = {
    "DeepSeek-V3.2": _built("transformers", "DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "DeepSeek-V3": _built("transformers", "DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "GLM-5, GLM-5.1": _built(*_GLM),
    "GLM-5.2, GLM-5.3": _built(*_GLM, **SHARES),
    "GLM-5.3-Flash": _glm_53_flash,
    "LongCat-Flash": _longcat,
    "dots.note": _built("sglang.srt.configs.dots3", "Dots3Config", "Dots3NoteForCausalLM", **SELECTS),
    "Hunyuan V4": _built("sglang.srt.configs.hy_v4", "HYV4Config", "HYV4ForCausalLM"),
    "Mistral Large 3": _mistral(),
    "Pixtral": _mistral(vision_encoder={"hidden_size": 64}),
}


def installed_models() -> dict[str, Any]:
    """Configs by model, of the classes that the installed packages have."""
    found = {}
    for name, build in BUILDERS.items():
        try:
            found[name] = build()
        except (ImportError, AttributeError):  # the class is younger than the installed packages
            continue
    return found
