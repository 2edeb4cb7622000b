"""Repairs to Triton's interpreter, so that it can be the judge of the kernels' logic. They touch no kernel."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported (its own library functions) and when a kernel is decorated; in the
    # environment no longer than that, so that programs started by other tests do not inherit it
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton import knobs
    except ImportError:
        pass
    else:
        knobs.runtime.interpret = True
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session", autouse=True)
def repaired_interpreter():
    """Under TRITON_INTERPRET: quick NaN-propagating reductions, and e4m3 conversions that round to nearest even.

    The interpreter calls a custom reduction once per element; np.max and np.min propagate NaN at once
    (test_interpreter compares both ways on a small tile). Its own conversion to e4m3 loses the carry of a mantissa
    that rounds up to a power of two; torch's conversion is right.
    """
    try:
        import triton.language as tl
        from triton import knobs
        from triton.runtime import interpreter

        from trtllm_core.kernels import attention_kernel, quantize_kernels
    except ImportError:
        yield
        return
    if not knobs.runtime.interpret:
        yield
        return
    apply_impl, convert_float = interpreter.ReduceOps.apply_impl, interpreter._convert_float
    reductions = {
        id(attention_kernel._nan_maximum): np.max,
        id(quantize_kernels._nan_minimum): np.min,
    }

    def reduce(self, inputs):
        reduction = reductions.get(id(self.combine_fn))
        if reduction is None:
            return apply_impl(self, inputs)
        return self.min_max(inputs[0], val_reduce_op=reduction, idx_reduce_op=None)

    def convert(data, source, target, rounding):
        if source == tl.float32 and target == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert_float(data, source, target, rounding)

    interpreter.ReduceOps.apply_impl, interpreter._convert_float = reduce, convert
    yield
    interpreter.ReduceOps.apply_impl, interpreter._convert_float = apply_impl, convert_float
