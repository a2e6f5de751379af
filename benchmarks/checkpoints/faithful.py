"""Write a tiny sparse checkpoint whose MTP layer equals its target, so that accept length measures draft metadata.

    python benchmarks/checkpoints/faithful.py OUT [--shape wide] [--model glm-5.2]

Greedy decoding must then accept every draft: a lower accept length means that a draft step attended to something else than
the target did. How it is built:

- Embeddings are +-1 with a constant first feature, so every RMSNorm is the identity and that feature works as a bias.
- One layer is the model: the RoPE part of its attention looks at certain distances, its MoE adds nothing.
- Every other layer does the same work and adds nothing at all.
- The MTP layer repeats the working layer; `eh_proj` passes the token embedding on and drops the hidden state.
- The indexer prefers the newest tokens, so contexts beyond index_topk keep the ones that matter.

`faithful_models` says which models there are, which distances count, and what the best accept length is.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from nsa_backend.benchmarks.checkpoints.faithful_models import MODELS, NEAR_PAIRS, ROPE_THETA, Model, rope_queries
from nsa_backend.benchmarks.checkpoints.ranks import BLOCK, FP8_CONFIG
from nsa_backend.testing.shape import INDEX_DIM, LATENT, ROPE, TOPK

VOCAB = 2048
V32 = MODELS["deepseek-v3.2"]


@dataclass(frozen=True)
class Shape:
    """What differs between checkpoints of a model; a model may have fewer heads and more layers."""

    hidden: int = 1024
    heads: int = 64
    layers: int = 2  # of the target; the MTP layer comes after them
    experts: int = 16
    experts_per_token: int = 2
    expert_dim: int = 128
    fp8: bool = False  # weights of projections and experts are block FP8, as released ones are


SHAPES = {
    "faithful": Shape(),
    "wide": Shape(hidden=2048, heads=128, layers=12, experts=64, experts_per_token=8, expert_dim=512),
}
"""`faithful` is small, so that the host shows; `wide` (7 GB) gives the GPU work in every layer."""

_HEADS = (("faithful", 32), ("faithful", 16), ("faithful", 8), ("wide", 16))
RANK_SHAPES = {f"{name}-{heads}-heads": replace(SHAPES[name], heads=heads) for name, heads in _HEADS}
"""The heads that a rank of tensor parallel 8 has of DeepSeek-V3.2 (16) and of GLM-5 (8), in a model that fits one GPU. Of 32
four GPUs have 8 each, of 16 two."""

ALL_SHAPES = (
    SHAPES
    | RANK_SHAPES
    | {
        "deep": Shape(heads=16, layers=61),
        "fp8-weights": Shape(4096, heads=16, expert_dim=256, fp8=True),
        "experts-of-a-rank": Shape(2048, heads=16, experts=256, experts_per_token=8, expert_dim=256, fp8=True),
    }
)
"""`deep` (2 GB) has as many layers as DeepSeek-V3.2. `fp8-weights` is wide enough for first products that are divided, and its
experts are whole blocks of scales on each of two ranks. `experts-of-a-rank` (1.3 GB) has experts as many and as wide as one of
eight ranks of DeepSeek-V3.2, which have tiles of their own."""


class Weights:
    """Random matrices from one seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.where(torch.rand(*shape, generator=self._generator) < 0.5, -1.0, 1.0)


def fitted(shape: Shape, model: Model) -> Shape:
    """`shape` with no more heads than the model has, and enough layers for what it shares between them."""
    return replace(shape, heads=min(shape.heads, model.most_heads), layers=max(shape.layers, model.least_layers))


def attention_weights(weights: Weights, shape: Shape, model: Model) -> dict[str, torch.Tensor]:
    """MLA whose score is mostly a RoPE kernel of the distance, fed by the constant feature."""
    q_rank, nope, v_dim = model.q_rank, model.nope, model.v_dim
    near = torch.zeros(ROPE)
    near[: 2 * NEAR_PAIRS] = 2**-0.5
    q_a = weights.normal(q_rank, shape.hidden, std=0.02 * shape.hidden**-0.5)
    q_a[0] = torch.eye(1, shape.hidden)  # after the norm, component 0 of the query latent is the constant sqrt(q_rank)
    q_b = weights.normal(shape.heads, nope + ROPE, q_rank, std=0.02)
    q_b[:, nope:] = 0
    q_b[:, nope:, 0] = rope_queries(shape.heads, model) * math.sqrt((nope + ROPE) / q_rank)
    kv_a = weights.normal(LATENT + ROPE, shape.hidden, std=shape.hidden**-0.5)
    kv_a[:, 0] = 0
    kv_a[LATENT:] = 0
    kv_a[LATENT:, 0] = near
    kv_b = weights.normal(shape.heads, nope + v_dim, LATENT, std=LATENT**-0.5)
    kv_b[:, :nope] *= 0.02
    return {
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": torch.ones(q_rank),
        "q_b_proj.weight": q_b.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": torch.ones(LATENT),
        "kv_b_proj.weight": kv_b.flatten(0, 1),
        "o_proj.weight": weights.normal(shape.hidden, shape.heads * v_dim, std=1.5 * (shape.heads * v_dim) ** -0.5),
    }


def indexer_weights(weights: Weights, shape: Shape, model: Model) -> dict[str, torch.Tensor]:
    """A lightning indexer whose score falls with the distance over the whole context."""
    far = torch.zeros(INDEX_DIM)
    for low, high in ((40, 58), (20, 29), (52, 61)):  # slow RoPE pairs, in either pairing convention
        far[low:high] = 1.0
    wq_b = weights.normal(model.index_heads, INDEX_DIM, model.q_rank, std=0.002)
    wq_b[:, :, 0] = far / math.sqrt(model.q_rank)
    wk = weights.normal(INDEX_DIM, shape.hidden, std=0.02 * shape.hidden**-0.5)
    wk[:, 0] = far
    gate = weights.normal(model.index_heads, shape.hidden, std=0.01 * shape.hidden**-0.5)
    gate[:, 0] = 1.0
    return {
        "indexer.wq_b.weight": wq_b.flatten(0, 1),
        "indexer.wk.weight": wk,
        "indexer.k_norm.weight": torch.ones(INDEX_DIM),
        "indexer.k_norm.bias": torch.zeros(INDEX_DIM),
        "indexer.weights_proj.weight": gate,
    }


def expert_weights(weights: Weights, shape: Shape) -> dict[str, torch.Tensor]:
    """MoE that runs and adds nothing: every down projection is zero."""
    out = {
        "gate.weight": weights.normal(shape.experts, shape.hidden, std=0.02),
        "gate.e_score_correction_bias": torch.zeros(shape.experts),
    }
    for expert in [f"experts.{i}" for i in range(shape.experts)] + ["shared_experts"]:
        out[f"{expert}.gate_proj.weight"] = weights.normal(shape.expert_dim, shape.hidden, std=shape.hidden**-0.5)
        out[f"{expert}.up_proj.weight"] = weights.normal(shape.expert_dim, shape.hidden, std=shape.hidden**-0.5)
        out[f"{expert}.down_proj.weight"] = torch.zeros(shape.hidden, shape.expert_dim)
    return out


def checkpoint(seed: int, shape: Shape, model: Model = V32) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its name in a released checkpoint, in the dtype it is stored in."""
    shape = fitted(shape, model)
    weights, hidden = Weights(seed), shape.hidden
    embed = weights.signs(VOCAB, hidden)
    embed[:, 0] = 1.0
    head = weights.normal(VOCAB, hidden, std=hidden**-0.5)
    head[:, 0] = 0
    layer = {"input_layernorm.weight": torch.ones(hidden), "post_attention_layernorm.weight": torch.ones(hidden)}
    layer |= {
        f"self_attn.{k}": v
        for k, v in (attention_weights(weights, shape, model) | indexer_weights(weights, shape, model)).items()
    }
    layer |= {f"mlp.{k}": v for k, v in expert_weights(weights, shape).items()}
    layer = stored(layer)
    out = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(hidden), "lm_head.weight": head}
    mtp = f"model.layers.{shape.layers}."
    out |= {
        mtp + "embed_tokens.weight": embed.clone(),
        mtp + "enorm.weight": torch.ones(hidden),
        mtp + "hnorm.weight": torch.ones(hidden),
        mtp + "eh_proj.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1),
        mtp + "shared_head.norm.weight": torch.ones(hidden),
        mtp + "shared_head.head.weight": head.clone(),
    }
    out = stored(out)
    for index in range(shape.layers + 1):
        silent = index not in (model.working_layer, shape.layers)
        for name, value in layer.items():
            if ".indexer." in name and not model.has_indexer(index, shape.layers):
                continue
            zero = silent and name == "self_attn.o_proj.weight"
            out[f"model.layers.{index}.{name}"] = torch.zeros_like(value) if zero else value.clone()
    return in_fp8(out, model.scale_fmt) if shape.fp8 else out


def in_fp8(tensors: dict[str, torch.Tensor], scale_fmt: str | None) -> dict[str, torch.Tensor]:
    """Projections and experts in FP8 with a scale a block, under the names of a released checkpoint; others as they are."""
    whole = ("weights_proj.weight", "eh_proj.weight")
    found = {}
    for name, value in tensors.items():
        named = name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight"))
        if not named or name.endswith(whole):
            found[name] = value
            continue
        rows, columns = value.shape
        padded = torch.nn.functional.pad(value.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, BLOCK, blocks, BLOCK]
        scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        scale = torch.where(scale == 0, 1.0, scale)
        scale = scale.log2().ceil().exp2() if scale_fmt == "ue8m0" else scale
        scaled = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        found[name] = scaled[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
        found[f"{name}_scale_inv"] = scale
    return found


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bfloat16, but for the three tensors that the model keeps in float32."""
    float32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")
    return {name: (value if name.endswith(float32) else value.bfloat16()).contiguous() for name, value in tensors.items()}


def config(shape: Shape, model: Model = V32) -> dict:
    """config.json of the checkpoint."""
    shape = fitted(shape, model)
    return {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "vocab_size": VOCAB,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": model.q_rank,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": model.nope,
        "v_head_dim": model.v_dim,
        "index_n_heads": model.index_heads,
        "index_head_dim": INDEX_DIM,
        "index_topk": TOPK,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_dim,
        "intermediate_size": 256,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        **model.fields,
        **({"quantization_config": FP8_CONFIG | {"scale_fmt": model.scale_fmt}} if shape.fp8 else {}),
    }


def write(out: Path, seed: int = 0, shape: Shape = SHAPES["faithful"], model: Model = V32) -> Path:
    """Write config.json and model.safetensors into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint(seed, shape, model), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(shape, model), indent=1))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="faithful")
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3.2")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed, ALL_SHAPES[arguments.shape], MODELS[arguments.model])
