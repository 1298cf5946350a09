"""bfloat16 under Triton's interpreter, for tests of SGLang's kernels on a CPU.

The interpreter keeps a bfloat16 tensor as its bits and computes on those as on integers, in silence; upstream calls the
type unsupported (triton-lang/triton issue 11584). A GPU computes on the values and rounds to the nearest, ties to even:
so it is done here, for products of matrices, arithmetic, comparison and conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def is_bits(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widened(handle: Any) -> Any:
    """The values as float32, exactly; any other type as it is."""
    if not is_bits(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrowed(values: np.ndarray) -> Any:
    """Float32 values as bfloat16, to the nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return TensorHandle(np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def install() -> None:
    """Puts itself in front of the interpreter's own operations."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    binary, unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return src if is_bits(src) else narrowed(cast(self, src, tl.float32).data)
        if not is_bits(src):
            return cast(self, src, dst_type)
        return widened(src) if dst_type.scalar == tl.float32 else cast(self, widened(src), dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_bits(lhs):
            return binary(self, lhs, rhs, op)
        found = op(widened(lhs).data, widened(rhs).data)
        return TensorHandle(found, tl.bfloat16) if found.dtype == bool else narrowed(found)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return narrowed(op(widened(arg).data)) if is_bits(arg) else unary(self, arg, op)

    for function in (create_dot, cast_impl, binary_op, unary_op):
        setattr(InterpreterBuilder, function.__name__, function)


install()
