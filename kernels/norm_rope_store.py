"""Behind a layer's first products one launch, to the bits of SGLang's own sequence of small kernels: norm_rope_store.cu.

It norms and quantises the query's latent, and writes KV and index keys. A prefill in pieces has the index keys alone.

    x -> qkv_a | wk | weights_proj -> `norm_rope_store` -> q_b | wq_b -> `rope_quantise` -> logits, top-k, attention
    x -> qkv_a                     -> `norm_rope_store` -> q_b        -> `rope_query`    -> attention

The second line is of layers that attend to what an earlier one has selected.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.cuda_source import Launch
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.local_slots import check_rank
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.projection_inputs import empty_input

SOURCE = Path(__file__).with_name("norm_rope_store.cu")
THREADS = 32
"""Of a block."""
INDEX_KEY = 2
"""Number of the part of a row that writes its index key; before it are the query's latent and KV."""
INDEX_PAGE_BYTES = PAGE_SIZE * (GROUP + 4)
"""Of a page of index keys: FP8 values, then float32 scales."""
MISREAD = "the kernel would misread it"


class Store(ctypes.Structure):
    """`Store` of norm_rope_store.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "key", "q_norm", "latent_norm", "key_norm", "key_bias")),
        *(
            (name, ctypes.c_void_p)
            for name in ("cos_sin", "index_cos_sin", "positions", "slots", "q", "q_scales", "kv", "index")
        ),
        *(
            (name, ctypes.c_longlong)
            for name in ("qkv_row", "key_row", "slots_stride", "q_scales_row", "q_scales_group", "kv_slot")
        ),
        *((name, ctypes.c_float) for name in ("q_eps", "latent_eps", "key_eps")),
        *((name, ctypes.c_int) for name in ("first", "before_ours")),
    ]


def constants(weights: FrontWeights, q_scales: Scales | None, *, kv_fp8: bool, ranks: int = 1, rank: int = 0) -> dict[str, int]:
    """Macros of the source."""
    flags = {
        "Q_FP8": q_scales is not None, "Q_POWERS": q_scales is Scales.POWERS_OF_TWO, "KV_FP8": kv_fp8, "NEOX": weights.neox,
        "INDEX_NEOX": weights.index_neox, "INDEX_FUSED": weights.index_fused,
    }  # fmt: skip
    sizes = {
        "Q_RANK": len(weights.q_norm),
        "LATENT": len(weights.latent_norm),
        "THREADS": THREADS,
        "RANKS": ranks,
        "RANK": rank,
    }
    return sizes | {name: int(flag) for name, flag in flags.items()}


def compile_ahead(
    device: torch.device, weights: FrontWeights, q_scales: Scales | None, *, kv_fp8: bool, ranks: int = 1, rank: int = 0
) -> None:
    """Compile it: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    macros = constants(weights, q_scales, kv_fp8=kv_fp8, ranks=ranks, rank=rank)
    cuda_source.kernel_on(cuda_source.index_of(device), SOURCE, THREADS, **macros)


def norm_rope_store(
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
    before_ours: bool = False,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norm the query's latent, write each row's KV and index key; one launch.

    Args:
        qkv: bfloat16 [rows, q rank + latent + rope], rows dense and multiples of 16 bytes apart.
        key: bfloat16 [rows, GROUP], rows dense and multiples of 8 bytes apart: index keys before their norm; None where none
            is written.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.
        slots: int64 [rows] of any stride. Slot 0 is padding's: its KV is left as it is, as SGLang does, and its index key
            is written. Real slots differ from one another.
        kv_cache: [slots, 1, latent + rope] of bfloat16, or FP8 or uint8 rows as `sparse_decode` reads them.
        index_cache: uint8 [pages, INDEX_PAGE_BYTES], contiguous; None as `key` is.
        q_scales: of the query's latent, for projections with FP8 weights; None for bfloat16.
        ranks: that divide slots among them, as `local_slots` says; this one is `rank`, and has KV of its own slots alone.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.
        launch: in place of a GPU.

    Returns:
        What `empty_input` describes, filled.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC or the driver refuses.
    """
    check_rank(ranks, rank)
    rows, q_rank, latent, rope = qkv.shape[0], len(weights.q_norm), len(weights.latent_norm), weights.rope
    kv_fp8 = kv_cache.dtype != torch.bfloat16
    kv_bytes = latent + latent // GROUP * 4 + rope * 2 if kv_fp8 else (latent + rope) * 2
    _check("qkv", qkv, (rows, q_rank + latent + rope), 16)
    fits = kv_cache.dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn) and kv_cache.shape[1] == 1
    fits = fits and kv_cache.stride(-1) == 1 and kv_cache.shape[2] * kv_cache.element_size() == kv_bytes
    form = f"[slots, 1, {kv_bytes} bytes] of bfloat16, or of FP8 or uint8"
    require(fits, "kv_cache", kv_cache, form, "the kernel would write elsewhere")
    q, scales = empty_input(rows, q_rank, q_scales, qkv.device)
    arguments = _arguments(key, weights, positions, slots, index_cache, rows)
    arguments.qkv, arguments.q, arguments.kv = qkv.data_ptr(), q.data_ptr(), kv_cache.data_ptr()
    arguments.qkv_row, arguments.kv_slot = 2 * qkv.stride(0), kv_cache.element_size() * kv_cache.stride(0)
    if scales is not None:
        arguments.q_scales, (arguments.q_scales_row, arguments.q_scales_group) = scales.data_ptr(), scales.stride()
    arguments.before_ours = before_ours
    if rows:
        macros = constants(weights, q_scales, kv_fp8=kv_fp8, ranks=ranks, rank=rank)
        launch = launch or cuda_source.kernel_on(qkv.device.index, SOURCE, THREADS, **macros).launch
        launch((rows, INDEX_KEY + (key is not None)), arguments)
    return q, scales


def store_index_keys(
    key: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_cache: torch.Tensor,
    *,
    launch: Launch | None = None,
) -> None:
    """Write each row's index key alone; one launch. Arguments and errors are those of `norm_rope_store`."""
    arguments = _arguments(key, weights, positions, slots, index_cache, len(key))
    arguments.first = INDEX_KEY
    if len(key):
        macros = constants(weights, None, kv_fp8=False)
        launch = launch or cuda_source.kernel_on(key.device.index, SOURCE, THREADS, **macros).launch
        launch((len(key), 1), arguments)


def _arguments(
    key: torch.Tensor | None,
    weights: FrontWeights,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_cache: torch.Tensor | None,
    rows: int,
) -> Store:
    """What an index key alone takes, checked."""
    check_tensor("positions", positions, torch.int64, (rows,))
    fits = slots.dtype == torch.int64 and slots.shape == (rows,)
    require(fits, "slots", slots, f"torch.int64 [{rows}]", "the kernel would write elsewhere")
    of_weights = {name: getattr(weights, name) for name in ("q_norm", "latent_norm", "cos_sin")}
    if key is not None:
        _check("key", key, (rows, GROUP), 8)
        check_tensor("index_cache", index_cache, torch.uint8, (len(index_cache), INDEX_PAGE_BYTES))
        of_weights |= {name: getattr(weights, name) for name in ("key_norm", "key_bias", "index_cos_sin")}
        of_weights |= {"key": key, "index": index_cache}
    pointers = {name: tensor.data_ptr() for name, tensor in of_weights.items()}
    return Store(
        **pointers, positions=positions.data_ptr(), slots=slots.data_ptr(), slots_stride=slots.stride(0),
        key_row=0 if key is None else 2 * key.stride(0), q_eps=weights.q_eps, latent_eps=weights.latent_eps,
        key_eps=weights.key_eps,
    )  # fmt: skip


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int], aligned: int) -> None:
    """Refuse what the kernel cannot read `aligned` bytes at a time."""
    fits = tensor.dtype == torch.bfloat16 and tensor.shape == shape and tensor.stride(1) == 1
    fits = fits and not tensor.data_ptr() % aligned and (len(tensor) < 2 or not 2 * tensor.stride(0) % aligned)
    require(fits, name, tensor, f"torch.bfloat16 {list(shape)}, rows dense and multiples of {aligned} bytes apart", MISREAD)
