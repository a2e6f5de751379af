"""The torch twin of `sparse_decode` and `sparse_verify`: the same sums row by row, in float32 and on the CPU."""

from __future__ import annotations

import torch

from nsa_backend.kernels.sparse_decode import behind_the_latent


def sparse_decode_torch(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Arguments as `sparse_decode.sparse_decode` takes them; float32 [rows, heads, latent], zeros where a row has no slot."""
    latent = q_nope.shape[-1]
    out = torch.zeros(q_nope.shape, dtype=torch.float32)
    query = torch.cat([q_nope, q_rope], dim=-1).float().cpu()
    for row, length in enumerate(lens.tolist()):
        chosen = topk_slots[row, :length].long()
        keys = _values(kv_cache[:, 0][chosen[chosen >= 0]], latent, q_nope.dtype).cpu()
        if len(keys):
            scores = sm_scale * query[row] @ keys.T
            scores = logit_cap * torch.tanh(scores / logit_cap) if logit_cap else scores
            out[row] = scores.softmax(-1) @ keys[:, :latent]
    return out


def _values(slots: torch.Tensor, latent: int, dtype: torch.dtype) -> torch.Tensor:
    """float32 [slots, latent + rope], what slots of either cache hold."""
    if slots.dtype != torch.float8_e4m3fn:
        return slots.float()
    rope, scales = behind_the_latent(slots, latent, dtype)
    quarters = slots[:, :latent].float().unflatten(-1, (4, -1))
    return torch.cat([(quarters * scales[..., None]).flatten(-2), rope.float()], dim=-1)
