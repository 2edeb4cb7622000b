"""Test-only nodes: conditioning without a text encoder, and observers of a run. Never shipped."""

from comfy_api.latest import ComfyExtension

from .capture import TestCaptureAttention
from .conditioning import TestConditioning, TestTrainedConditioning
from .foreign import TestForeignForward, TestForeignOverride, TestForeignReport, TestForwards
from .memory import TestMemoryReport, TestWatchStorages
from .probe import TestProbe, TestProbeReport
from .real_shape import TestRandomWan, TestStepTimes, TestStepTimesReport
from .stats import TestStatsReport


class TestExtension(ComfyExtension):
    """The pack's node list."""

    async def get_node_list(self):
        return [
            TestCaptureAttention,
            TestConditioning,
            TestTrainedConditioning,
            TestProbe,
            TestProbeReport,
            TestWatchStorages,
            TestMemoryReport,
            TestStatsReport,
            TestRandomWan,
            TestStepTimes,
            TestStepTimesReport,
            TestForeignForward,
            TestForeignOverride,
            TestForeignReport,
            TestForwards,
        ]


async def comfy_entrypoint():
    """What ComfyUI calls."""
    return TestExtension()
