"""Time a function on the GPU."""

import statistics
import time

import torch


def median_ms(function, repeats=5, seconds=0.0, warm_up=1):
    """Median milliseconds of a call by CUDA events, over `repeats` calls and at least `seconds`.

    warm_up: calls before that are not counted.
    """
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    times, began = [], time.monotonic()
    while len(times) < repeats or time.monotonic() - began < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
