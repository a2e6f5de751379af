"""The size of the trained model and the config.json that SGLang reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from nsa_backend.benchmarks import faithful_checkpoint
from nsa_backend.benchmarks.faithful_models import ROPE_THETA
from nsa_backend.testing.shape import INDEX_DIM, LATENT, NOPE, ROPE, TOPK

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """DeepSeek-V3.2's architecture at 170M parameters; RoPE is plain (no YaRN), embedding and head are not tied.

    The layers of the target have a dense MLP (first_k_dense_replace = layers, which V3.2 sets to 3). SGLang builds an MTP layer
    with experts in any case, so the MTP layer's MLP is stored as its shared experts, beside routed experts that add nothing.
    """

    vocab: int = 16384
    hidden: int = 1024
    layers: int = 6  # of the target; the MTP layer comes after them
    heads: int = 16
    q_rank: int = 512
    kv_rank: int = LATENT
    nope: int = NOPE
    rope: int = ROPE
    v_dim: int = 128
    mlp: int = 2560
    index_heads: int = 64
    index_dim: int = INDEX_DIM
    index_topk: int = TOPK
    experts: int = 16  # of the MTP layer, all zero
    expert_dim: int = 128

    def __post_init__(self):
        if self.layers < 2:
            raise ValueError("layers must be at least 2: SGLang loads layer 0 of a one-layer checkpoint as the MTP layer")
        if self.mlp % self.expert_dim:
            raise ValueError(f"mlp ({self.mlp}) must be a multiple of expert_dim ({self.expert_dim}): shared experts hold it")

    @property
    def qk_dim(self) -> int:
        return self.nope + self.rope


SHAPES = {
    "small": Shape(),
    "tiny": Shape(vocab=512, hidden=64, layers=2, heads=2, q_rank=32, kv_rank=32, nope=16, rope=8, v_dim=16, mlp=64,
                  index_heads=4, index_dim=16, index_topk=16, experts=4, expert_dim=32),
}  # fmt: skip
"""`small` is the one that is served; `tiny` exercises every step on a CPU and is not something SGLang's kernels run."""


def config(shape: Shape) -> dict:
    """config.json: the faithful checkpoint's fields with this shape's sizes."""
    return faithful_checkpoint.config(faithful_checkpoint.Shape()) | {
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_rope_head_dim": shape.rope,
        "qk_nope_head_dim": shape.nope,
        "v_head_dim": shape.v_dim,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_dim,
        "index_topk": shape.index_topk,
        "intermediate_size": shape.mlp,
        "first_k_dense_replace": shape.layers,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": shape.mlp // shape.expert_dim,
        "moe_intermediate_size": shape.expert_dim,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
    }


def to_json(shape: Shape) -> dict:
    return asdict(shape)
