"""The models that the faithful checkpoint imitates, and by what their drafts are right.

`deepseek-v3.2` and `glm-5.1`: every draft step selects for itself and attends to all tokens up to its own. The target prefers
the newest tokens, itself first, so a draft step is right where it sees what the target sees, and one token less is another
next token. The best possible accept length is N + 1.

`glm-5.2`: all draft steps attend with the selection of the last accepted row (`index_share_for_mtp_iteration`): to the L tokens
of the target, neither to themselves nor to drafts before them. A draft step still knows its own token, which comes in through
the embedding. So the target's next token depends on its own token and, through attention, on none of the `lag` - 1 tokens
before it: head h looks at the one token that is `lag` + h mod 4 back, and at hardly anything else (other tokens weigh less than
a bfloat16 of the sum can tell). Draft step i stands i + 1 tokens after the newest one that it may see, so it sees all it needs
while i + 1 <= `lag`, and computes what the target will compute once its drafts are accepted.

- The best possible accept length is N + 1 up to N = `lag` + 1 = 5. Later steps lack one of the four distances or more: their
  drafts are right by luck, one in six of the first.
- The slots that attention reads matter at every step: other slots are other tokens and another next token. With N = `lag` + 1
  the last step needs the newest token that it may see, so a row that is cut short by one loses every last draft; with less
  steps the newest `lag` - N + 1 tokens may be missing unseen. Lengths beyond L read what is in no selection: nothing of the
  model tells what comes of that.
- Its layers share selections too: the layer that does the work is the third one after its indexer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_backend.testing.shape import NOPE, ROPE

ROPE_THETA = 10000.0
NEAR_PAIRS = 8
"""The fastest RoPE pairs: the score falls off within a few tokens."""
SHARPNESS = 6
"""Of a head that looks at one distance: a token beside it scores 6.4 lower, which leaves it two thousandths of the weight."""
HEAD_DISTANCES = 4
"""Distances that the heads of a model with a lag spread over."""


@dataclass(frozen=True)
class Model:
    """What an architecture sets; sizes that cost time and memory are left to the checkpoint's shape."""

    architecture: str
    model_type: str
    nope: int = NOPE  # qk_nope_head_dim
    v_dim: int = 128
    q_rank: int = 512
    index_heads: int = 64
    most_heads: int = 128
    least_layers: int = 2  # of one layer alone, SGLang would load layer 0 as the MTP layer
    working_layer: int = 0  # the layer that adds something, which the MTP layer repeats
    lag: int = 0  # how far back the nearest token is that attention looks at; 0: at the newest, itself first
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json, beyond those of all models
    full_layers: frozenset[int] | None = None  # of the target, those with an indexer; None for all
    scale_fmt: str | None = None  # of FP8 weights of the released model: powers of two, or any

    def has_indexer(self, layer: int, layers: int) -> bool:
        """Whether `layer` of a target with `layers` layers selects; the MTP layer, which comes after them, does."""
        return self.full_layers is None or layer >= layers or layer in self.full_layers


_GLM = {"architecture": "GlmMoeDsaForCausalLM", "model_type": "glm_moe_dsa", "nope": 192, "v_dim": 256, "q_rank": 2048,
        "index_heads": 32, "most_heads": 64}  # fmt: skip
_GLM_FIELDS = {
    "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}

MODELS = {
    "deepseek-v3.2": Model("DeepseekV32ForCausalLM", "deepseek_v32", scale_fmt="ue8m0"),
    "glm-5.1": Model(**_GLM, fields=_GLM_FIELDS),
    "glm-5.2": Model(
        **_GLM,
        least_layers=6,
        working_layer=5,
        lag=4,
        fields=_GLM_FIELDS | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True},
        full_layers=frozenset({0, 1, 2, 6, 10}),
    ),
}
"""By name; `glm-5.2` shares selections between draft steps and between layers as that model does."""


def rope_queries(heads: int, model: Model) -> torch.Tensor:
    """[heads, ROPE]: times the constant keys, a score that is highest at the distance that each head looks at."""
    angles = torch.full((heads, NEAR_PAIRS), math.pi / 4)  # that of the keys
    scale = 1.0
    if model.lag:
        distance = model.lag + torch.arange(heads) % HEAD_DISTANCES
        angles -= distance[:, None] * ROPE_THETA ** (-2 * torch.arange(NEAR_PAIRS) / ROPE)
        scale = SHARPNESS
    pairs = scale * torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
    return torch.nn.functional.pad(pairs, (0, ROPE - pairs.shape[1]))
