"""CUDA C++ of ours: compiled by NVRTC, kept for later processes, loaded and launched by the driver.

NVRTC and the driver come through cuda-python, which SGLang requires; no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ARCHITECTURE = "sm_90a"
DIGEST = hashlib.sha256
"""Of what a cubin is made from, which is its file's name, and of the cubin, which its file begins with."""


def kept(source: Path, constants: Mapping[str, int]) -> bytes:
    """`compiled`'s cubin: what an earlier process kept of the same source, compiler and macros, or it is kept now.

    Where it cannot be kept a warning says why.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    path = _folder() / f"{_made_from(source, constants)}.cubin"
    try:
        found = path.read_bytes()
        digest, cubin = found[: DIGEST().digest_size], found[DIGEST().digest_size :]
        if DIGEST(cubin).digest() == digest:
            return cubin
    except FileNotFoundError:
        pass
    except OSError as error:
        _cannot_keep(path.parent, error)
    cubin, _ = compiled(source, constants)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:  # other ranks write the same file
            made = Path(own) / path.name
            made.write_bytes(DIGEST(cubin).digest() + cubin)
            made.replace(path)
    except OSError as error:
        _cannot_keep(path.parent, error)
    return cubin


def _folder() -> Path:
    """Among SGLang's caches."""
    return Path(os.environ.get("SGLANG_CACHE_DIR") or "~/.cache/sglang").expanduser() / "nsa_backend"


_told: set[Path] = set()
"""Folders that nothing could be kept in, as the log says once."""


def _cannot_keep(folder: Path, error: OSError) -> None:
    if folder not in _told:
        _told.add(folder)
        logger.warning(
            "nsa_backend: kernels in CUDA C++ are compiled at every start, as %s cannot keep them (%s): "
            "set SGLANG_CACHE_DIR to a folder with room that this user may write to",
            folder, error.strerror,
        )  # fmt: skip


def _made_from(source: Path, constants: Mapping[str, int]) -> str:
    """Names what a cubin is made from and by."""
    given = DIGEST(repr((_nvrtc(source).nvrtcVersion()[1:], _options(constants))).encode())
    for file in (source, *_headers(source)):
        given.update(repr((file.name, file.read_bytes())).encode())
    return given.hexdigest()


def _options(constants: Mapping[str, int]) -> list[str]:
    fixed = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v"]
    return fixed + [f"-D{name}={value}" for name, value in constants.items()]


def _headers(source: Path) -> list[Path]:
    return sorted(source.parent.glob("*.cuh"))


def _nvrtc(source: Path) -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError(f"{source.name} is compiled by NVRTC of cuda-python, which does not load: {error}") from error
    return nvrtc


def compiled(source: Path, constants: Mapping[str, int]) -> tuple[bytes, str]:
    """(cubin for Hopper, what the compiler said of registers and memory).

    Args:
        source: a file that includes none but the .cuh files beside it.
        constants: macros that it is compiled with.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    nvrtc, options, headers = _nvrtc(source), _options(constants), _headers(source)
    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    failed, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(headers), texts, names)
    _expect(failed, f"making a program of {source.name}")
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.rstrip(b"\0 ").decode(errors="replace")
    if int(failed):
        raise RuntimeError(f"NVRTC refuses {source.name}: {said}")
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    _expect(nvrtc.nvrtcGetCUBIN(program, cubin)[0], f"compiling {source.name}")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin, said


class TensorMap(ctypes.Structure):
    """`TensorMap` of hopper.cuh."""

    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


def tensor_map(tensor: torch.Tensor, box_rows: int) -> TensorMap:
    """What `copy_tile` is told of a contiguous tensor of bytes or FP8 [rows, columns]: boxes of so many rows, 128 bytes each.

    Raises:
        RuntimeError: the driver refuses.
    """
    return _encoded(tensor.data_ptr(), *tensor.shape, box_rows)


@functools.lru_cache(maxsize=1024)  # weights of as many layers
def _encoded(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    from cuda.bindings import driver

    failed, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)], [driver.cuuint64_t(columns)],
        [driver.cuuint32_t(128), driver.cuuint32_t(box_rows)], [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    _expect(failed, "describing a tensor in boxes")
    return TensorMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), ctypes.sizeof(TensorMap)))


Boxes = Callable[[torch.Tensor, int], TensorMap]
"""What a caller takes in place of `tensor_map`."""
ALIGNMENT = 1024
"""Bytes of a block's shared memory that it may take to have tiles where tensor cores want them."""

Launch = Callable[[tuple[int, int], ctypes.Structure], None]
"""What a kernel's caller takes in place of `CudaKernel.launch`: runs it for (blocks, 1)."""


class CudaKernel:
    """One function of a source, on the current device."""

    def __init__(self, source: Path, name: str, constants: Mapping[str, int], threads: int, shared_bytes: int):
        """Compile it; a launch has blocks of `threads`, each with `shared_bytes` of dynamic shared memory.

        Raises:
            RuntimeError: NVRTC or the driver refuses.
        """
        from cuda.bindings import driver

        self._driver, self._threads, self._shared_bytes = driver, threads, shared_bytes
        cubin = kept(source, constants)
        torch.cuda.current_stream().synchronize()  # makes the context
        failed, self._module = driver.cuModuleLoadData(cubin)
        _expect(failed, f"loading {source.name}")
        failed, self._function = driver.cuModuleGetFunction(self._module, name.encode())
        _expect(failed, f"finding {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _expect(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)[0], "shared memory")
        self._beside = driver.CUlaunchAttribute()
        self._beside.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._beside.value.programmaticStreamSerializationAllowed = 1

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Launch it on torch's stream; it may begin before what is ahead of it ends, and waits for that itself.

        Raises:
            RuntimeError: the driver refuses.
        """
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [self._beside], 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _expect(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0)[0], "launching")

    def variable(self, name: str) -> bytes:
        """What a variable of the source has in the GPU's memory, once all launches have ended.

        Raises:
            RuntimeError: there is none, or the driver refuses.
        """
        torch.cuda.synchronize()
        failed, address, size = self._driver.cuModuleGetGlobal(self._module, name.encode())
        _expect(failed, f"finding {name}")
        found = ctypes.create_string_buffer(size)
        _expect(self._driver.cuMemcpyDtoH(ctypes.addressof(found), address, size)[0], f"reading {name}")
        return found.raw


@functools.cache
def kernel_on(device: int, source: Path, threads: int, shared_bytes: int = 0, **macros: int) -> CudaKernel:
    """The function of a source that is called as the file is, compiled at its first call on a device.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    with torch.cuda.device(device):
        return CudaKernel(source, source.stem, macros, threads, shared_bytes)


def index_of(device: torch.device) -> int:
    """Of a GPU, the current one where it says none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _expect(status: Any, what: str) -> None:
    if int(status):
        raise RuntimeError(f"{what}: {getattr(status, 'name', status)}")
