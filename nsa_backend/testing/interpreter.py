"""Triton's interpreter without the work whose result it drops, and with a GPU's rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache


def drop_unused_work() -> None:
    """Leave out what the interpreter does and nobody sees (Triton 3.6 and 3.8): more than half of the time of our kernels.

    Call after TRITON_INTERPRET is set; a second call changes nothing.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter._patch_lang, "own"):
        return
    options = interpreter.interpreter_builder.options
    if not options.debug:  # without it, checks of every integer operation are computed, and nobody looks at them
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = _of_scalar(interpreter._get_np_dtype)


class _PatchOnce:
    """In place of what a launch does to Triton's language for the time that it takes.

    Each call of a device function does it again, which looks at every name of the language.
    """

    def __init__(self, own: Callable, scope: type):
        self.own, self.scope = own, scope
        self.patched: set[int] = set()
        """Modules of the language, while a launch is under way."""
        self.languages = cache(_languages)

    def __call__(self, function: Callable) -> object:
        languages, of_launch = self.languages(function), not self.patched
        if not of_launch and languages <= self.patched:
            return self.scope()
        scope = self.own(function)
        self.patched |= languages
        if of_launch:
            restore = scope.restore
            scope.restore = lambda: (self.patched.clear(), restore())
        return scope


def _languages(function: Callable) -> frozenset[int]:
    import triton.language as tl

    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


def _of_scalar(own: Callable) -> Callable:
    """numpy's dtype of a Triton type, whose table `own` makes anew in every call."""
    import triton.language as tl

    of_scalar = cache(own)

    def found(dtype: tl.dtype) -> object:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return own(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return found


def round_as_a_gpu_does() -> None:
    """Narrow float32 to the nearest bfloat16 or FP8 value, ties to even, widen denormals right, and round `tl.fma` once.

    The interpreter cuts bfloat16 off, loses its denormals, drops the carry of FP8 and rounds the product of `tl.fma` too
    (Triton 3.6 and 3.8). Call after TRITON_INTERPRET is set.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    narrow = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def rounding(original):
        def convert(self, source, wanted, *mode):
            dtype = wanted.scalar
            if source.dtype.scalar == tl.bfloat16 and dtype == tl.float32:
                return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), dtype)
            if source.dtype.scalar != tl.float32 or dtype not in narrow:
                return original(self, source, wanted, *mode)
            values, (to, bits) = torch.from_numpy(np.array(source.data)), narrow[dtype]
            if dtype == tl.float8e4nv:
                values = values.clamp(-448.0, 448.0)
            return TensorHandle(values.to(to).view(bits).numpy(), dtype)

        return convert

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    for name in ("create_fp_ext", "create_fp_trunc", "create_fp_to_fp"):
        original = getattr(InterpreterBuilder, name)
        if original.__name__ != "convert":
            setattr(InterpreterBuilder, name, rounding(original))
    InterpreterBuilder.create_fma = create_fma
