"""The torch twins of both launches in front of a layer: one step of SGLang's sequence after the other, rounded where it rounds.

Sums are taken in the order of FlashInfer's norms, and fused products in double precision: exact but for one rounding.
"""

from __future__ import annotations

import torch

from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.projection_inputs import empty_input

FP8_MAX = 448.0
LANES = 32


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """float32 a * b + c with one rounding."""
    b, c = (value.double() if isinstance(value, torch.Tensor) else value for value in (b, c))
    return (a.double() * b + c).float()


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def sum_in_order(x: torch.Tensor, per_lane: int, squares: bool, far: bool = False) -> torch.Tensor:
    """float32 [rows, 1] of float32 [rows, width]: each of 32 lanes from left to right, then neighbours (or far ones) pairwise.

    A lane has `per_lane` values in a row of every 32 * per_lane.
    """
    values = x.reshape(len(x), x.shape[1] // (LANES * per_lane), LANES, per_lane).transpose(1, 2).flatten(2)
    total = torch.zeros_like(values[..., 0])
    for i in range(values.shape[2]):
        total = fma(values[..., i], values[..., i], total) if squares else total + values[..., i]
    while total.shape[1] > 1:
        total = sum(total.chunk(2, dim=1)) if far else total[:, 0::2] + total[:, 1::2]
    return total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bfloat16 [rows, width] normed, as rounded float32."""
    x = x.float()
    rstd = torch.rsqrt(sum_in_order(x, 8, squares=True) / x.shape[1] + eps)
    return rounded(x * rstd * (weight.float() + 0.0))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, fused: bool = False) -> torch.Tensor:
    """bfloat16 [rows, GROUP] normed, as float32: rounded, or in a kernel that is `fused` with RoPE as it is."""
    x = x.float()
    centred = x - sum_in_order(x, 4, squares=False, far=fused) * (1.0 / GROUP)
    rstd = torch.rsqrt(fma(sum_in_order(centred, 4, squares=True, far=fused), 1.0 / GROUP, eps))
    normed = fma(centred * rstd, weight, bias.expand_as(x))
    return normed if fused else rounded(normed)


def rope(x: torch.Tensor, angles: torch.Tensor, neox: bool) -> torch.Tensor:
    """float32 [rows, heads, width] with its first values rotated by float32 [rows, rope], rounded."""
    width = angles.shape[1]
    cos, sin = angles[:, None].chunk(2, dim=-1)
    turned, out = x[..., :width], x.clone()
    first, second = turned.chunk(2, dim=-1) if neox else (turned[..., 0::2], turned[..., 1::2])
    parts = fma(cos, first, -(sin * second)), fma(cos, second, sin * first)
    out[..., :width] = rounded(torch.cat(parts, dim=-1) if neox else torch.stack(parts, dim=-1).flatten(-2))
    return out


def rope_neighbours(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """float32 [rows, heads, width] with its first values rotated by float32 [rows, rope], as SGLang's fused kernels do."""
    width = angles.shape[1]
    cos, sin = angles[:, None].chunk(2, dim=-1)
    first, second, out = x[..., 0:width:2], x[..., 1:width:2], x.clone()
    out[..., :width] = torch.stack((fma(cos, first, -(sin * second)), fma(sin, first, cos * second)), dim=-1).flatten(-2)
    return out


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., GROUP] times the Hadamard matrix over sqrt(GROUP), rounded."""
    shape = x.shape
    for stage in range(7):
        low, high = x.reshape(-1, GROUP >> (stage + 1), 2, 1 << stage).unbind(2)
        x = torch.stack((low + high, low - high), dim=2)
    return rounded(x.reshape(shape) * GROUP**-0.5)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """float32 to float8_e4m3fn, the largest finite value where it does not fit."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantise(x: torch.Tensor, form: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, width] as FP8, and float32 [rows, width / GROUP] of its scales."""
    grouped = x.view(len(x), x.shape[1] // GROUP, GROUP)
    largest = grouped.abs().amax(-1).clamp(min=1e-10)
    scale, inverse = largest * (1.0 / FP8_MAX), torch.full_like(largest, FP8_MAX) / largest
    if form is Scales.POWERS_OF_TWO:
        fraction, exponent = torch.frexp(scale)
        exponent = exponent - (fraction == 0.5).int()
        scale, inverse = torch.ldexp(torch.ones_like(scale), exponent), torch.ldexp(torch.ones_like(scale), -exponent)
    return fp8(grouped * inverse[..., None]).view(x.shape), scale


def norm_rope_store_torch(
    qkv: torch.Tensor,
    key: torch.Tensor | None,
    weights: FrontWeights,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    q_scales: Scales | None,
    *,
    ranks: int = 1,
    rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The torch twin of `norm_rope_store`."""
    rows, q_rank, latent = qkv.shape[0], weights.q_norm.shape[0], weights.latent_norm.shape[0]
    q_raw, latent_raw, rope_raw = qkv.split((q_rank, latent, weights.rope), dim=1)
    q, scales = empty_input(rows, q_rank, q_scales, qkv.device)
    x = rms_norm(q_raw, weights.q_norm, weights.q_eps)
    if q_scales is not None:
        for room, values in zip((q, scales), quantise(x, q_scales), strict=True):
            room.copy_(values)
    else:
        q.copy_(x)
    real = (slots != 0) & (slots % ranks == rank)
    at = slots[real] // ranks
    latents, latent_scales, k_rope = parts_of_cache(kv_cache, latent)
    x = rms_norm(latent_raw, weights.latent_norm, weights.latent_eps)
    if kv_cache.dtype == torch.bfloat16:
        latents[at, 0, :latent] = x[real].bfloat16()
    else:
        grouped = x.view(rows, latent // GROUP, GROUP)
        scale = grouped.abs().amax(-1) / FP8_MAX
        # A group of zeros has scale 0; zero times infinity is NaN, which Triton's clamp turns into the upper bound.
        scaled = (grouped * (1.0 / scale)[..., None]).nan_to_num(nan=FP8_MAX, posinf=FP8_MAX, neginf=-FP8_MAX)
        latents.view(torch.uint8)[at, 0, :latent] = fp8(scaled).view(torch.uint8).view(rows, latent)[real]
        latent_scales[at, 0] = scale[real]
    turned = rope(rope_raw.float()[:, None], weights.cos_sin[positions], weights.neox)
    k_rope[at, 0, : weights.rope] = turned[real, 0].bfloat16()
    if key is None:
        return q, scales

    x = layer_norm(key, weights.key_norm, weights.key_bias, weights.key_eps, weights.index_fused)[:, None]
    if weights.index_fused:
        x = rounded(rope_neighbours(x, weights.index_cos_sin[positions]))[:, 0]
    else:
        x = hadamard(rope(x, weights.index_cos_sin[positions], weights.index_neox))[:, 0]
    scale = x.abs().amax(-1).clamp(min=1e-4) / FP8_MAX
    values = index_cache.view(-1, PAGE_SIZE * (GROUP + 4))[:, : PAGE_SIZE * GROUP].view(-1, PAGE_SIZE, GROUP)
    pages, places = slots // PAGE_SIZE, slots % PAGE_SIZE
    values[pages, places] = fp8(x * (1.0 / scale)[:, None]).view(torch.uint8)
    index_cache.view(torch.float32)[pages, PAGE_SIZE * GROUP // 4 + places] = scale
    return q, scales


def parts_of_cache(kv_cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of every slot's latent, scales and rotated part, each of its own dtype; no scales in bfloat16."""
    if kv_cache.dtype == torch.bfloat16:
        return kv_cache, kv_cache, kv_cache[..., latent:]
    packed, after_scales = kv_cache.view(torch.float8_e4m3fn), latent + latent // GROUP * 4
    return packed, packed[..., latent:after_scales].view(torch.float32), packed[..., after_scales:].view(torch.bfloat16)


def rope_quantise_torch(
    query: torch.Tensor, gates: torch.Tensor, q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The torch twin of `rope_quantise`."""
    out = rope_query_torch(q_rope, weights, positions)
    if weights.index_fused:
        x = rope_neighbours(query.float(), weights.index_cos_sin[positions])
        scale = x.abs().amax(-1).clamp(min=1e-4) / FP8_MAX
        weighed = gates.float() * (query.shape[1] ** -0.5 * GROUP**-0.5) * scale
        return fp8(x * (1.0 / scale)[..., None]), weighed[..., None], out
    x = hadamard(rope(query.float(), weights.index_cos_sin[positions], weights.index_neox))
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1).clamp(min=1e-4) * (1.0 / FP8_MAX))))
    weighed = gates * query.shape[1] ** -0.5 * scale * GROUP**-0.5
    return fp8(x / scale[..., None]), weighed[..., None], out


def rope_query_torch(q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor) -> torch.Tensor:
    """The torch twin of `rope_query`."""
    return rope(q_rope.float(), weights.cos_sin[positions], weights.neox).bfloat16()


def product_torch(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, columns]: one of `tile_products`, summed in double precision."""
    of_rows = x_scales.double().repeat_interleave(GROUP, 1)
    of_columns = weight_scales.double().repeat_interleave(GROUP, 0)[: len(weight)].repeat_interleave(GROUP, 1)
    return ((x.double() * of_rows) @ (weight.double() * of_columns).T).bfloat16()


def value_products_torch(attended: torch.Tensor, weight: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of `value_products`, summed in double precision."""
    values = torch.einsum("rhl,hlv->rhv", attended.double(), weight.double()).bfloat16()
    return quantise(values.float().flatten(1), scales)


def add_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, sum) of `add_norm`, bfloat16, with squares in double precision."""
    total = x.float() + residual.float()
    mean = total.double().square().mean(dim=1, keepdim=True).float()
    return (total * torch.rsqrt(mean + eps) * weight.float()).bfloat16(), total.bfloat16()
