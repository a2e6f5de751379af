"""Triton's interpreter without the work whose result it drops, and with a GPU's rounding."""

from __future__ import annotations

from dataclasses import replace


def drop_overflow_checks() -> None:
    """Compute no overflow checks: without `debug`, the interpreter makes one of every integer operation and looks at none.

    They take a third of the time of our kernels (Triton 3.6 and 3.8). Call after TRITON_INTERPRET is set.
    """
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = replace(options, sanitize_overflow=False)


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
