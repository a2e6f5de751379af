"""CUDA's driver through ctypes: kernels from cubins, and launches with attributes, which torch has no call for."""

from __future__ import annotations

import ctypes
import functools

import torch


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
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""Of CUfunction_attribute."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _expect(error: int, what: str) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'error').decode()} ({error})")


@functools.cache
def loaded(cubin: bytes, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """Handle of a kernel on the device, which has to be current, with so much shared memory a block at most."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream(device).synchronize()  # makes the context
    _expect(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
    _expect(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
    _expect(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes), "shared memory")
    return function


def launch(
    function: ctypes.c_void_p,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: ctypes.Structure | ctypes.Array,
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
