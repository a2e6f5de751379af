"""Write a tiny DeepSeek-V3.2 checkpoint whose MTP layer equals its target, so that accept length measures draft metadata.

    python tests/e2e/faithful_checkpoint.py OUT

Greedy decoding must then accept every draft: a lower accept length means that a draft step attended to something else than
the target did. How it is built:

- Embeddings are +-1 with a constant first feature, so every RMSNorm is the identity and that feature works as a bias.
- Layer 0 is the model: the RoPE part of its attention prefers the newest tokens, its MoE adds nothing.
- Layer 1 adds nothing at all (a checkpoint of one layer would make SGLang load layer 0 as the MTP layer).
- Layer 2, the MTP layer, repeats layer 0; `eh_proj` passes the token embedding on and drops the hidden state.
- The indexer prefers the newest tokens, so contexts beyond index_topk keep the ones that matter.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, HEADS = 1024, 2048, 64
Q_RANK, KV_RANK, ROPE, NOPE, V_DIM = 512, 512, 64, 128, 128
EXPERTS, EXPERT_DIM, INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 16, 128, 64, 128, 2048
LAYERS, MTP_LAYER = 2, 2


class Weights:
    """Random matrices from one seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.where(torch.rand(*shape, generator=self._generator) < 0.5, -1.0, 1.0)


def attention_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """MLA whose score is mostly a RoPE kernel of the distance, fed by the constant feature."""
    near = torch.zeros(ROPE)
    near[:16] = 2**-0.5  # the eight fastest RoPE pairs: the score falls off within a few tokens
    q_a = weights.normal(Q_RANK, HIDDEN, std=0.02 * HIDDEN**-0.5)
    q_a[0] = torch.eye(1, HIDDEN)  # after the norm, component 0 of the query latent is the constant sqrt(Q_RANK)
    q_b = weights.normal(HEADS, NOPE + ROPE, Q_RANK, std=0.02)
    q_b[:, NOPE:] = 0
    q_b[:, NOPE:, 0] = near * math.sqrt((NOPE + ROPE) / Q_RANK)
    kv_a = weights.normal(KV_RANK + ROPE, HIDDEN, std=HIDDEN**-0.5)
    kv_a[:, 0] = 0
    kv_a[KV_RANK:] = 0
    kv_a[KV_RANK:, 0] = near
    kv_b = weights.normal(HEADS, NOPE + V_DIM, KV_RANK, std=KV_RANK**-0.5)
    kv_b[:, :NOPE] *= 0.02
    return {
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": torch.ones(Q_RANK),
        "q_b_proj.weight": q_b.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": torch.ones(KV_RANK),
        "kv_b_proj.weight": kv_b.flatten(0, 1),
        "o_proj.weight": weights.normal(HIDDEN, HEADS * V_DIM, std=1.5 * (HEADS * V_DIM) ** -0.5),
    }


def indexer_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """A lightning indexer whose score falls with the distance over the whole context."""
    far = torch.zeros(INDEX_DIM)
    for low, high in ((40, 58), (20, 29), (52, 61)):  # slow RoPE pairs, in either pairing convention
        far[low:high] = 1.0
    wq_b = weights.normal(INDEX_HEADS, INDEX_DIM, Q_RANK, std=0.002)
    wq_b[:, :, 0] = far / math.sqrt(Q_RANK)
    wk = weights.normal(INDEX_DIM, HIDDEN, std=0.02 * HIDDEN**-0.5)
    wk[:, 0] = far
    gate = weights.normal(INDEX_HEADS, HIDDEN, std=0.01 * HIDDEN**-0.5)
    gate[:, 0] = 1.0
    return {
        "indexer.wq_b.weight": wq_b.flatten(0, 1),
        "indexer.wk.weight": wk,
        "indexer.k_norm.weight": torch.ones(INDEX_DIM),
        "indexer.k_norm.bias": torch.zeros(INDEX_DIM),
        "indexer.weights_proj.weight": gate,
    }


def expert_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """MoE that runs and adds nothing: every down projection is zero."""
    out = {"gate.weight": weights.normal(EXPERTS, HIDDEN, std=0.02), "gate.e_score_correction_bias": torch.zeros(EXPERTS)}
    for expert in [f"experts.{i}" for i in range(EXPERTS)] + ["shared_experts"]:
        out[f"{expert}.gate_proj.weight"] = weights.normal(EXPERT_DIM, HIDDEN, std=HIDDEN**-0.5)
        out[f"{expert}.up_proj.weight"] = weights.normal(EXPERT_DIM, HIDDEN, std=HIDDEN**-0.5)
        out[f"{expert}.down_proj.weight"] = torch.zeros(HIDDEN, EXPERT_DIM)
    return out


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its name in a DeepSeek-V3.2 checkpoint."""
    weights = Weights(seed)
    embed = weights.signs(VOCAB, HIDDEN)
    embed[:, 0] = 1.0
    head = weights.normal(VOCAB, HIDDEN, std=HIDDEN**-0.5)
    head[:, 0] = 0
    layer = {"input_layernorm.weight": torch.ones(HIDDEN), "post_attention_layernorm.weight": torch.ones(HIDDEN)}
    layer |= {f"self_attn.{k}": v for k, v in (attention_weights(weights) | indexer_weights(weights)).items()}
    layer |= {f"mlp.{k}": v for k, v in expert_weights(weights).items()}
    out = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": head}
    for index in range(LAYERS + 1):
        silent = index == 1
        for name, value in layer.items():
            zero = silent and name == "self_attn.o_proj.weight"
            out[f"model.layers.{index}.{name}"] = torch.zeros_like(value) if zero else value.clone()
    mtp = f"model.layers.{MTP_LAYER}."
    return out | {
        mtp + "embed_tokens.weight": embed.clone(),
        mtp + "enorm.weight": torch.ones(HIDDEN),
        mtp + "hnorm.weight": torch.ones(HIDDEN),
        mtp + "eh_proj.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        mtp + "shared_head.norm.weight": torch.ones(HIDDEN),
        mtp + "shared_head.head.weight": head.clone(),
    }


CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": V_DIM,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": INDEX_TOPK,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_DIM,
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


def write(out: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    float32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")
    tensors = {k: (v if k.endswith(float32) else v.bfloat16()).contiguous() for k, v in checkpoint(seed).items()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)
