"""Sparse MLA decode for few rows in CUDA C++ (kernel.cu): compiles a tile once through NVRTC and launches it.

What it computes is `sparse_decode`'s, for a bfloat16 KV cache of the model's shape on Hopper, without a cap of the scores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels.sparse_decode import Parts

LATENT, ROPE = 512, 64
ROW_BYTES = 2 * (LATENT + ROPE)
MOST_PARTS = 128
"""Of a row, that the second kernel joins."""
MOST_SHARED_BYTES = 232448
"""Of a block, on Hopper."""
SOURCE = Path(__file__).with_name("kernel.cu")


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class CudaTile:
    """What one block holds at a time, and how its warps share it: the constants of kernel.cu."""

    heads: int  # of a block: 16, 32 or 64
    tokens: int  # of a step
    stages: int  # steps in shared memory or on their way there
    warps_heads: int  # that share the heads in scores
    warps_tokens: int
    warps_values: int  # that share the 576 values of the dot product
    query_in_registers: bool = True
    cluster: int = 1  # blocks of a row that join through distributed shared memory
    blocks: int = 1  # on an SM at a time
    score_padding: int = 8
    bulk: bool = True  # a token comes as one bulk copy, or else in pieces of 16 bytes
    passes: int = 1  # over the tokens of a warp in scores
    wgmma: bool = (
        False  # products of warp groups: 64 heads, 64 tokens, two stages, eight warps; the rest but the cluster is unused
    )

    @classmethod
    def of(cls, rows: int, heads: int) -> CudaTile:
        """By estimate, until it is measured: as few heads a block as reading the tokens again for each block allows."""
        if heads <= 16 or rows * heads <= 64:
            return TILES["h16"]
        return TILES["h32"] if heads <= 32 or rows * heads <= 128 else TILES["h64"]

    @property
    def threads(self) -> int:
        return 32 * self.warps_heads * self.warps_tokens * self.warps_values

    @property
    def name(self) -> str:
        """Every constant, in a word that can be a file's."""
        warps = f"{self.warps_heads}{self.warps_tokens}{self.warps_values}"
        query = "r" if self.query_in_registers else "s"
        word = f"h{self.heads}t{self.tokens}s{self.stages}w{warps}{query}"
        return (
            word
            + f"c{self.cluster}b{self.blocks}p{self.score_padding}n{self.passes}"
            + ("" if self.bulk else "a")
            + ("wgmma" if self.wgmma else "")
        )

    def macros(self) -> dict[str, int]:
        """What kernel.cu is compiled with."""
        return {
            "TILE_HEADS": self.heads,
            "TILE_TOKENS": self.tokens,
            "TILE_STAGES": self.stages,
            "TILE_WARPS_H": self.warps_heads,
            "TILE_WARPS_T": self.warps_tokens,
            "TILE_WARPS_D": self.warps_values,
            "TILE_QUERY_IN_REGISTERS": int(self.query_in_registers),
            "TILE_CLUSTER": self.cluster,
            "TILE_BLOCKS": self.blocks,
            "TILE_SCORE_PADDING": self.score_padding,
            "TILE_PASSES": self.passes,
            "TILE_BULK": int(self.bulk),
            "TILE_WGMMA": int(self.wgmma),
        }

    @property
    def shared_bytes(self) -> int:
        """SHARED_BYTES of kernel.cu."""
        if self.wgmma:
            rows = (self.stages * self.tokens + self.heads) * ROW_BYTES + self.heads * 2 * self.tokens
            return rows + 12 * self.heads + 4 * self.stages * self.tokens + 1024
        pitch = ROW_BYTES + 16
        query = _up(self.heads * pitch, 128)
        scores = _up(self.warps_values * self.heads * (self.tokens + self.score_padding) * 4, 128)
        tokens = _up(self.stages * self.tokens * pitch, 128)
        between = max(query, scores) if self.query_in_registers else query + scores
        weights = _up(self.heads * (2 * self.tokens + 16), 128)
        return tokens + between + weights + 12 * self.heads + 4 * self.stages * self.tokens + 8 * (self.stages + 1)


TILES = {
    "h16": CudaTile(16, 32, 5, 1, 2, 4),
    "h32": CudaTile(32, 32, 4, 1, 2, 4),
    "h64": CudaTile(64, 64, 2, 2, 1, 4, wgmma=True),
}
"""Those that `CudaTile.of` names."""


@dataclass(frozen=True)
class CudaSplit:
    """How the rows of one call are split; depends on shapes alone, so a shape's results do too."""

    parts: int  # of a row, that the second kernel joins; 1 where there is none
    blocks: int  # of a row: parts times the cluster
    chunk: int  # tokens of a block

    @classmethod
    def of(cls, rows: int, heads: int, topk: int, num_sms: int, tile: CudaTile) -> CudaSplit:
        """As many blocks as fit the GPU at once, or one cluster a row."""
        per_row = num_sms * tile.blocks // max(rows * -(-heads // tile.heads), 1)
        wanted = max(1, per_row // tile.cluster) * tile.cluster
        chunk = _up(-(-topk // min(wanted, MOST_PARTS * tile.cluster)), tile.tokens)
        blocks = _up(max(-(-topk // chunk), 1), tile.cluster)
        return cls(blocks // tile.cluster, blocks, chunk)


JOINS = (1, 4, 8)
"""Warps that share the parts of a row and head in the second kernel."""


def join_of(parts: int) -> int:
    """By estimate, until it is measured: a warp reads eight parts at once."""
    return 1 if parts <= 8 else 4 if parts <= 32 else 8


class AttendArguments(ctypes.Structure):
    """`Attend` of kernel.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "kv", "slots", "lens", "out", "partial", "lse")),
        *(
            (name, ctypes.c_longlong)
            for name in ("q_nope_row", "q_nope_head", "q_rope_row", "q_rope_head", "slots_stride", "kv_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("topk", "heads", "parts", "chunk")),
    ]


class JoinArguments(ctypes.Structure):
    """`Join` of kernel.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "lse", "out")),
        *((name, ctypes.c_int) for name in ("heads", "parts")),
    ]


@dataclass(frozen=True)
class Call:
    """The launches of one call."""

    attend: AttendArguments
    grid: tuple[int, int, int]
    join: JoinArguments
    join_grid: tuple[int, int, int]
    join_warps: int  # that share the parts; 0 where nothing is joined


def prepare(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
    parts: Parts | None,
    tile: CudaTile,
    split: CudaSplit,
    join_warps: int,
) -> Call:
    """Arguments and grids; the tensors have to outlive the launches."""
    rows, heads, _ = q_nope.shape
    partial, lse = (parts.out.data_ptr(), parts.lse.data_ptr()) if split.parts > 1 else (None, None)
    attend = AttendArguments(
        q_nope.data_ptr(),
        q_rope.data_ptr(),
        kv_cache.data_ptr(),
        topk_slots.data_ptr(),
        lens.data_ptr(),
        out.data_ptr(),
        partial,
        lse,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        topk_slots.stride(0),
        kv_cache.stride(0) * kv_cache.element_size(),
        sm_scale * math.log2(math.e),
        topk_slots.shape[1],
        heads,
        split.parts,
        split.chunk,
    )
    join_grid = (1 if join_warps == 1 else 4, heads, rows)
    return Call(
        attend,
        (split.blocks, -(-heads // tile.heads), rows),
        JoinArguments(partial, lse, out.data_ptr(), heads, split.parts),
        join_grid,
        join_warps if split.parts > 1 else 0,
    )


def sparse_decode_cuda(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    *,
    num_sms: int,
    parts: Parts | None = None,
    tile: CudaTile | None = None,
    join_warps: int | None = None,
) -> torch.Tensor:
    """softmax(sm_scale * (q_nope . latent + q_rope . rope)) @ latent over the slots of each row; one launch or two.

    Equal shapes give equal bits. Each tile is compiled at its first call, which therefore comes before a graph is captured.

    Args:
        q_nope: bfloat16 [rows, heads, 512], the last dimension dense.
        q_rope: bfloat16 [rows, heads, 64], the last dimension dense.
        kv_cache: bfloat16 [slots, 1, 576], rows dense. Slots that no row names are never read.
        topk_slots: int32 [rows, topk], rows dense; -1 where there is none.
        lens: int32 [rows], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        num_sms: of the GPU.
        parts: memory for what is joined; None, or too little of it, allocates.
        tile: `CudaTile.of` if None; another one is for measurements.
        join_warps: `join_of` if None; likewise, of JOINS.

    Returns:
        bfloat16 [rows, heads, 512]; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC is missing, or the driver refuses.
    """
    rows, heads, _ = q_nope.shape
    topk = topk_slots.shape[1]
    _check(q_nope, q_rope, kv_cache, topk_slots, lens)
    out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=q_nope.device)
    if rows == 0:
        return out
    # A bulk copy starts at a multiple of 16 bytes.
    q_nope, q_rope = _aligned(q_nope), _aligned(q_rope)
    tile = tile or CudaTile.of(rows, heads)
    split = CudaSplit.of(rows, heads, topk, num_sms, tile)
    size = rows * split.parts * heads
    if split.parts > 1 and (parts is None or not parts.hold(size)):
        parts = Parts.of(size, LATENT, out.device)
    join_warps = join_warps or join_of(split.parts)
    call = prepare(q_nope, q_rope, kv_cache, topk_slots, lens, sm_scale, out, parts, tile, split, join_warps)
    functions = _functions(tile, q_nope.device.index)
    stream = torch.cuda.current_stream(q_nope.device).cuda_stream
    _launch(functions["attend"], call.grid, tile.threads, tile.shared_bytes, call.attend, stream, tile.cluster)
    if call.join_warps:
        threads = 256 if call.join_warps == 8 else 128
        shared = threads * 16 + threads // 32 * MOST_PARTS * 4
        _launch(functions[f"join{call.join_warps}"], call.join_grid, threads, shared, call.join, stream)
    return out


def _aligned(query: torch.Tensor) -> torch.Tensor:
    if query.data_ptr() % 16 or any(stride % 8 for stride in query.stride()[:2]):
        return query.contiguous().clone() if query.is_contiguous() else query.contiguous()
    return query


def _check(
    q_nope: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, topk_slots: torch.Tensor, lens: torch.Tensor
) -> None:
    rows, heads, latent = q_nope.shape
    bf16 = torch.bfloat16
    wrong = {
        "q_nope": latent != LATENT or q_nope.stride(-1) != 1 or q_nope.dtype != bf16,
        "q_rope": q_rope.shape != (rows, heads, ROPE) or q_rope.stride(-1) != 1 or q_rope.dtype != bf16,
        "kv_cache": kv_cache.shape[1:] != (1, LATENT + ROPE)
        or kv_cache.stride(-1) != 1
        or kv_cache.dtype != bf16
        or kv_cache.stride(0) % 8
        or kv_cache.data_ptr() % 16,
        "topk_slots": topk_slots.shape[0] != rows or topk_slots.stride(-1) != 1 or topk_slots.dtype != torch.int32,
        "lens": lens.shape != (rows,) or not lens.is_contiguous() or lens.dtype != torch.int32,
    }
    tensors = {"q_nope": q_nope, "q_rope": q_rope, "kv_cache": kv_cache, "topk_slots": topk_slots, "lens": lens}
    for name, is_wrong in wrong.items():
        if is_wrong:
            tensor = tensors[name]
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with stride {tensor.stride()}: see sparse_decode_cuda"
            )


# Compilation


def cubin_name(tile: CudaTile) -> str:
    """Of the file that holds this tile, compiled from this source."""
    return f"sparse_decode_{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}_{tile.name}.cubin"


prebuilt: list[Path] = []
"""Folders of cubins, by `cubin_name`, that are taken before NVRTC is asked."""


def compiled(tile: CudaTile) -> tuple[bytes, str]:
    """(cubin for sm_90a, what the compiler said), by NVRTC.

    Raises:
        RuntimeError: NVRTC is missing or refuses the source.
    """
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None):
        raise RuntimeError("NVRTC makes no program")
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in tile.macros().items()]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode(errors="replace")
    if failed:
        raise RuntimeError(f"NVRTC refuses {tile}: {said}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, said


def _library_folders() -> Iterator[Path]:
    """Where wheels, torch and CUDA itself keep NVRTC."""
    for package, folders in (("nvidia", ("cu13/lib", "cuda_nvrtc/lib", "cu12/lib")), ("torch", ("lib",))):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            yield from (Path(root) / folder for folder in folders)
    for entry in sys.path:
        yield Path(entry) / "nvidia" / "cu13" / "lib"
    for root in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        yield from (root / "lib64", *root.glob("targets/*/lib"))
    yield from (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for folder in _library_folders():
        for path in sorted(folder.glob("libnvrtc.so*"), reverse=True):
            try:
                # NVRTC looks for its built-ins on the loader's path alone.
                for builtins in sorted(folder.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                return ctypes.CDLL(str(path))
            except OSError as error:
                tried.append(str(error))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(str(error))
    raise RuntimeError(f"NVRTC is not installed: {'; '.join(tried)}")


# The driver


class _AttributeValue(ctypes.Union):
    _fields_ = [("cluster", ctypes.c_uint * 3), ("number", ctypes.c_int), ("size", ctypes.c_char * 64)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Of CUlaunchAttributeID."""
MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
"""Of CUfunction_attribute."""
PORTABLE_CLUSTER = 8


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _expect(error: int, what: str) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'error').decode()} ({error})")


@functools.cache
def _functions(tile: CudaTile, device: int) -> dict[str, ctypes.c_void_p]:
    """Handles of the kernels by name, on the device, which has to be current."""
    found = (folder / cubin_name(tile) for folder in prebuilt)
    path = next((path for path in found if path.exists()), None)
    cubin = path.read_bytes() if path else compiled(tile)[0]
    driver, module, functions = _driver(), ctypes.c_void_p(), {}
    torch.cuda.current_stream(device).synchronize()  # makes the context
    _expect(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {tile.name}")
    for name in ("attend", *(f"join{warps}" for warps in JOINS)):
        function = functions[name] = ctypes.c_void_p()
        _expect(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
    attend = functions["attend"]
    _expect(driver.cuFuncSetAttribute(attend, MAX_DYNAMIC_SHARED_SIZE_BYTES, tile.shared_bytes), "shared memory")
    if tile.cluster > PORTABLE_CLUSTER:
        _expect(driver.cuFuncSetAttribute(attend, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1), "cluster size")
    return functions


def _launch(
    function: ctypes.c_void_p,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: ctypes.Structure,
    stream: int,
    cluster: int = 1,
) -> None:
    """Beside the end of the kernel before, whose results it waits for itself."""
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value.number = PROGRAMMATIC_STREAM_SERIALIZATION, 1
    attributes[1].id, attributes[1].value.cluster[:] = CLUSTER_DIMENSION, (cluster, 1, 1)
    config = _Config(grid, (threads, 1, 1), shared_bytes, stream, attributes, 2 if cluster > 1 else 1)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    _expect(_driver().cuLaunchKernelEx(ctypes.byref(config), function, parameters, None), "launching")
