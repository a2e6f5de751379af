"""SGLang 0.5.23's own attention layer of a released model with random block-FP8 weights, as one of eight ranks has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.benchmarks.checkpoints.ranks import RANKS
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.testing.shape import LATENT, ROPE


def shape_of(rank: str) -> dict[str, Any]:
    """What a layer of a rank has, from the released config."""
    config = RANKS[rank].config
    return {
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "nope": config["qk_nope_head_dim"],
        "v": config["v_head_dim"],
        "q_rank": config["q_lora_rank"],
        "index_heads": config["index_n_heads"],
        "neighbours": config.get("indexer_rope_interleave", False),
        "scales": config["quantization_config"].get("scale_fmt"),
    }


SHAPES = {
    "deepseek-v3.2": shape_of("v3.2-tp8"),
    "glm-5.1": shape_of("glm-5.1-tp8"),
    "glm-5.2, shared": shape_of("glm-5.2-tp8") | {"index_heads": 0},
}
"""`neighbours`: how index heads rotate; SGLang fuses the indexer of such models. No index heads: an earlier layer selects."""
POSITIONS, TOPK = 4096, 2048


def whole_layer(model: str, side_stream: torch.cuda.Stream | None, device: str = "cuda") -> Any:
    """A DeepseekV2AttentionMLA of `model` (of SHAPES), whose projections DeepGEMM multiplies on Hopper."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    shape = SHAPES[model]
    config = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"], rms_norm_eps=1e-6, index_topk=TOPK, index_n_heads=shape["index_heads"] or 32,
        index_head_dim=128, num_hidden_layers=1, rope_interleave=True, indexer_rope_interleave=shape["neighbours"],
    )  # fmt: skip
    quantised, before = Fp8Config(True, "dynamic", None, [GROUP, GROUP], scale_fmt=shape["scales"]), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            layer = DeepseekV2AttentionMLA(
                config, shape["hidden"], shape["heads"], shape["nope"], ROPE, shape["v"], shape["q_rank"], LATENT, layer_id=0,
                max_position_embeddings=POSITIONS, quant_config=quantised, alt_stream=side_stream,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight_scale_inv":
                parameter.data = torch.rand_like(parameter) * 1e-2
            else:
                drawn = 0.5 * torch.randn(parameter.shape, device=device) + ("norm" in type(module).__name__.lower())
                parameter.data = drawn.to(parameter.dtype)
        if type(getattr(module, "quant_method", None)) is Fp8LinearMethod:
            module.quant_method.process_weights_after_loading(module)
    layer.w_kc = torch.randn(shape["heads"], LATENT, shape["nope"], device=device).bfloat16().transpose(1, 2)
    layer.current_attention_backend = "dsa"
    if not shape["index_heads"]:
        layer.indexer, layer.skip_topk = None, True
    return layer
