"""Time a function on the GPU."""

import torch


def median_ms(function, repeats=5):
    """Median of `repeats` runs by CUDA events, after one run that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]
