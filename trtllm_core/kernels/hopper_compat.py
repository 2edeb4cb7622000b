"""The Gluon calls that were renamed between Triton 3.6 and 3.9, under one name each. Needs Triton 3.6 or later."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
warpgroup_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
