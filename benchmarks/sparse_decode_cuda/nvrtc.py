"""Compiles kernel.cu and what it includes for Hopper, which takes no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.cu")


def compiled(macros: dict[str, int], source: Path = SOURCE) -> tuple[bytes, str]:
    """(cubin for sm_90a, what the compiler said), by NVRTC.

    Raises:
        RuntimeError: NVRTC is missing or refuses the source.
    """
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers = sorted(SOURCE.parent.glob("*.h"))
    texts, names = (_strings(f(path) for path in headers) for f in (Path.read_bytes, lambda path: path.name.encode()))
    arguments = (source.read_bytes(), source.name.encode(), len(headers), texts, names)
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), *arguments):
        raise RuntimeError("NVRTC makes no program")
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(option.encode() for option in options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode(errors="replace")
    if failed:
        raise RuntimeError(f"NVRTC refuses {source.name} with {macros}: {said}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, said


def _strings(values: Iterable[bytes]) -> ctypes.Array:
    given = list(values)
    return (ctypes.c_char_p * len(given))(*given)


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
