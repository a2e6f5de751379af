"""Write a tiny DeepSeek-V3.2 checkpoint whose MTP layer equals its target, so that accept length measures draft metadata.

    python benchmarks/faithful_checkpoint.py OUT [--shape wide]

Greedy decoding must then accept every draft: a lower accept length means that a draft step attended to something else than
the target did. How it is built:

- Embeddings are +-1 with a constant first feature, so every RMSNorm is the identity and that feature works as a bias.
- Layer 0 is the model: the RoPE part of its attention prefers the newest tokens, its MoE adds nothing.
- Every layer after it does the same work and adds nothing at all (a checkpoint of one layer would make SGLang load layer 0 as
  the MTP layer).
- The MTP layer repeats layer 0; `eh_proj` passes the token embedding on and drops the hidden state.
- The indexer prefers the newest tokens, so contexts beyond index_topk keep the ones that matter.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 2048
Q_RANK, KV_RANK, ROPE, NOPE, V_DIM = 512, 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 64, 128, 2048


@dataclass(frozen=True)
class Shape:
    """What differs between checkpoints; the rest is DeepSeek-V3.2's."""

    hidden: int = 1024
    heads: int = 64
    layers: int = 2  # of the target; the MTP layer comes after them
    experts: int = 16
    experts_per_token: int = 2
    expert_dim: int = 128


SHAPES = {
    "faithful": Shape(),
    "wide": Shape(hidden=2048, heads=128, layers=12, experts=64, experts_per_token=8, expert_dim=512),
}
"""`faithful` is small, so that the host shows; `wide` (7 GB) gives the GPU work in every layer."""


class Weights:
    """Random matrices from one seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.where(torch.rand(*shape, generator=self._generator) < 0.5, -1.0, 1.0)


def attention_weights(weights: Weights, shape: Shape) -> dict[str, torch.Tensor]:
    """MLA whose score is mostly a RoPE kernel of the distance, fed by the constant feature."""
    near = torch.zeros(ROPE)
    near[:16] = 2**-0.5  # the eight fastest RoPE pairs: the score falls off within a few tokens
    q_a = weights.normal(Q_RANK, shape.hidden, std=0.02 * shape.hidden**-0.5)
    q_a[0] = torch.eye(1, shape.hidden)  # after the norm, component 0 of the query latent is the constant sqrt(Q_RANK)
    q_b = weights.normal(shape.heads, NOPE + ROPE, Q_RANK, std=0.02)
    q_b[:, NOPE:] = 0
    q_b[:, NOPE:, 0] = near * math.sqrt((NOPE + ROPE) / Q_RANK)
    kv_a = weights.normal(KV_RANK + ROPE, shape.hidden, std=shape.hidden**-0.5)
    kv_a[:, 0] = 0
    kv_a[KV_RANK:] = 0
    kv_a[KV_RANK:, 0] = near
    kv_b = weights.normal(shape.heads, NOPE + V_DIM, KV_RANK, std=KV_RANK**-0.5)
    kv_b[:, :NOPE] *= 0.02
    return {
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": torch.ones(Q_RANK),
        "q_b_proj.weight": q_b.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": torch.ones(KV_RANK),
        "kv_b_proj.weight": kv_b.flatten(0, 1),
        "o_proj.weight": weights.normal(shape.hidden, shape.heads * V_DIM, std=1.5 * (shape.heads * V_DIM) ** -0.5),
    }


def indexer_weights(weights: Weights, shape: Shape) -> dict[str, torch.Tensor]:
    """A lightning indexer whose score falls with the distance over the whole context."""
    far = torch.zeros(INDEX_DIM)
    for low, high in ((40, 58), (20, 29), (52, 61)):  # slow RoPE pairs, in either pairing convention
        far[low:high] = 1.0
    wq_b = weights.normal(INDEX_HEADS, INDEX_DIM, Q_RANK, std=0.002)
    wq_b[:, :, 0] = far / math.sqrt(Q_RANK)
    wk = weights.normal(INDEX_DIM, shape.hidden, std=0.02 * shape.hidden**-0.5)
    wk[:, 0] = far
    gate = weights.normal(INDEX_HEADS, shape.hidden, std=0.01 * shape.hidden**-0.5)
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


def checkpoint(seed: int, shape: Shape) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its name in a DeepSeek-V3.2 checkpoint, in the dtype it is stored in."""
    weights, hidden = Weights(seed), shape.hidden
    embed = weights.signs(VOCAB, hidden)
    embed[:, 0] = 1.0
    head = weights.normal(VOCAB, hidden, std=hidden**-0.5)
    head[:, 0] = 0
    layer = {"input_layernorm.weight": torch.ones(hidden), "post_attention_layernorm.weight": torch.ones(hidden)}
    layer |= {f"self_attn.{k}": v for k, v in (attention_weights(weights, shape) | indexer_weights(weights, shape)).items()}
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
        silent = 0 < index < shape.layers
        for name, value in layer.items():
            zero = silent and name == "self_attn.o_proj.weight"
            out[f"model.layers.{index}.{name}"] = torch.zeros_like(value) if zero else value.clone()
    return out


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bfloat16, but for the three tensors that the model keeps in float32."""
    float32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")
    return {name: (value if name.endswith(float32) else value.bfloat16()).contiguous() for name, value in tensors.items()}


def config(shape: Shape) -> dict:
    """config.json of the checkpoint."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "vocab_size": VOCAB,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": V_DIM,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": INDEX_TOPK,
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
        "rope_theta": 10000.0,
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
    }


def write(out: Path, seed: int = 0, shape: Shape = SHAPES["faithful"]) -> Path:
    """Write config.json and model.safetensors into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint(seed, shape), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(shape), indent=1))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=SHAPES, default="faithful")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed, SHAPES[arguments.shape])
