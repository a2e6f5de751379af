"""Whether every variant is right on this GPU: relative errors against float32, equal bits in repeats.

What may not count is NaN: slots that no row names, memory for parts, and the shared memory that a kernel begins with.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from nsa_backend.benchmarks.sparse_decode_cuda import driver, nvrtc
from nsa_backend.benchmarks.sparse_decode_cuda.tiles import LATENT, MOST_PARTS, MOST_SHARED_BYTES, ROPE
from nsa_backend.benchmarks.sparse_decode_cuda.variants import VARIANTS, Variant
from nsa_backend.kernels.sparse_decode import Parts

SLOTS, SCALE, TOO_FAR, REPEATS = 1 << 16, 0.05, 5e-3, 5
SHAPES = (  # rows, heads, topk, lens, holes
    (1, 16, 2048, [2048], False),
    (2, 8, 2048, [2048, 300], True),
    (3, 16, 2048, [0, 1, 17], False),
    (4, 32, 2048, [2048, 2047, 33, 1000], True),
    (8, 16, 2048, [2048] * 8, False),
    (16, 24, 2048, [2048, 5] * 8, True),
    (1, 64, 2048, [2048], True),
    (8, 64, 2048, [2048, 1, 2, 3, 0, 700, 64, 65], True),
    (8, 128, 2048, [2048] * 8, False),
    (32, 16, 2048, [2048] * 31 + [9], True),
    (64, 128, 2048, [2048] * 64, False),
    (140, 64, 2048, [100] * 140, True),
    (2, 40, 333, [333, 111], True),
)


def inputs_of(rows: int, heads: int, topk: int, lens: list[int], holes: bool, seed: int) -> tuple[torch.Tensor, ...]:
    """What a variant is called with; the queries are not dense, and with `holes` a fifth of the slots are -1."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    lengths = torch.tensor(lens, dtype=torch.int32, device="cuda")
    slots = torch.stack([torch.randperm(SLOTS, generator=g, device="cuda")[:topk] for _ in range(rows)]).int()
    if holes:
        slots = torch.where(torch.rand(rows, topk, generator=g, device="cuda") < 0.2, -1, slots)
    used = slots[(torch.arange(topk, device="cuda") < lengths[:, None]) & (slots >= 0)].unique().long()
    kv = torch.full((SLOTS, 1, LATENT + ROPE), float("nan"), dtype=torch.bfloat16, device="cuda")
    kv[used] = torch.randn(len(used), 1, LATENT + ROPE, generator=g, device="cuda").bfloat16()
    nope = torch.randn(heads, rows, LATENT, generator=g, device="cuda").bfloat16().transpose(0, 1)
    rope = torch.randn(rows, heads, 8 + ROPE, generator=g, device="cuda").bfloat16()[..., 8:]
    return nope, rope, kv, slots, lengths


def expected(q_nope: torch.Tensor, q_rope: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor):
    """The project's torch reference, in float32."""
    from nsa_backend.attention.inputs import SparseInputs
    from nsa_backend.attention.torch_reference import TorchSparseAttention

    looked_at = torch.arange(slots.shape[1], device=slots.device) < lens[:, None]
    return TorchSparseAttention().forward(
        SparseInputs(
            q_nope=q_nope.float(), q_rope=q_rope.float(), kv_cache=kv, topk_slots=torch.where(looked_at, slots, -1),
            cache_seqlens=None, cu_seqlens_q=None, cu_seqlens_k=None, sm_scale=SCALE, logit_cap=0.0,
        )
    )  # fmt: skip


def poison(num_sms: int) -> None:
    """Fill every SM's shared memory with NaN."""
    function = driver.loaded(_poison_cubin(), "poison", MOST_SHARED_BYTES, torch.cuda.current_device())
    torch.cuda.synchronize()  # it does not wait for the kernel before
    stream = torch.cuda.current_stream().cuda_stream
    driver.launch(function, (2 * num_sms, 1, 1), 256, MOST_SHARED_BYTES, (ctypes.c_int * 1)(0), stream)
    torch.cuda.synchronize()


@functools.cache
def _poison_cubin() -> bytes:
    return nvrtc.compiled({}, Path(__file__).with_name("poison.cu"))[0]


def error_of(variant: Variant, inputs: tuple, want: torch.Tensor, num_sms: int) -> tuple[float, str | None]:
    """(relative error, what is wrong)."""
    rows, heads, _ = want.shape
    parts = Parts.of(rows * MOST_PARTS * heads, LATENT, "cuda")
    parts.out.fill_(float("nan"))
    parts.lse.fill_(float("nan"))
    poison(num_sms)
    got = variant.call(inputs, SCALE, num_sms, parts=parts)
    error = float((got.float() - want).norm() / want.norm())
    empty = (want == 0).flatten(1).all(1)
    if not error < TOO_FAR:
        return error, f"relative error {error:.1e}"
    if not bool((got[empty] == 0).all()):
        return error, "a row without slots is not zero"
    again = [variant.call(inputs, SCALE, num_sms, parts=parts) for _ in range(REPEATS)]
    return error, None if all(torch.equal(x, got) for x in again) else "repeats differ"


def check(num_sms: int) -> tuple[dict[str, float], dict[str, list[str]]]:
    """(the largest relative error by variant, what was wrong by variant) over all shapes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    errors: dict[str, float] = {}
    wrong: dict[str, list[str]] = {}
    for seed, (rows, heads, *shape) in enumerate(SHAPES):
        inputs = inputs_of(rows, heads, *shape, seed)
        want = expected(*inputs)
        for name, variant in VARIANTS.items():
            if not variant.has(heads):
                continue
            error, problem = error_of(variant, inputs, want, num_sms)
            errors[name] = max(errors.get(name, 0.0), error)
            if problem is not None:
                wrong.setdefault(name, []).append(f"{rows} rows, {heads} heads: {problem}")
        print(f"checked {rows} rows of {heads} heads, wrong so far: {wrong or 'none'}", flush=True)
    return {name: float(f"{error:.2e}") for name, error in errors.items()}, wrong
