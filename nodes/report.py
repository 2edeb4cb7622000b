"""TRTLLM Attention Report: what a run did, as a picture and as text."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io, ui

from ..trtllm_core.stats import RunStats
from .report_picture import draw
from .report_text import NO_PATCH, cutoffs, doubts, report, summary, versions
from .schema import StatsType, schema
from .status import show

PICTURE_TITLE = "Skip-Softmax: tiles skipped by layer and step"
EARLIER = "An earlier run: the patched model was not sampled in this prompt"


class TRTLLMAttentionReport(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMAttentionReport",
            "TRTLLM Attention Report",
            "Shows what the last run of a patched model did: which backends ran, how many tiles "
            "Skip-Softmax left out in each layer and step, the time of each role, and every call "
            "that was left to ComfyUI. Saved as a picture and a Markdown file.",
            search_aliases=("attention statistics", "sparsity", "heat map", "benchmark"),
            inputs=[
                io.Latent.Input(
                    "samples", tooltip="From the sampler, so that this runs after it; passed on unchanged."
                ),
                StatsType.Input(
                    "stats",
                    optional=True,
                    tooltip="From the Attention Patch of the sampled model. Without it, as when the patch "
                    "is bypassed, the samples pass through and there is nothing to report.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="attention/report",
                    tooltip="Where in the output folder the picture and the text are saved.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="LATENT"),
                io.String.Output(display_name="report", tooltip="The text, as Markdown."),
                io.Image.Output(display_name="picture"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, samples, filename_prefix, stats=None) -> io.NodeOutput:
        if stats is None:
            show(cls.hidden.unique_id, NO_PATCH)
            picture = draw(RunStats(), PICTURE_TITLE, NO_PATCH, {})
            return io.NodeOutput(samples, NO_PATCH, picture, ui={"text": [NO_PATCH]})
        stats.wanted = True
        text = report(stats)
        run = stats.last
        gates = cutoffs(stats) if run is not None else {}
        words = "\n".join((*(doubt.replace("*", "") for doubt in doubts(stats)), summary(run)))
        picture = draw(run or RunStats(), PICTURE_TITLE, EARLIER if run and doubts(stats) else versions(stats), gates)
        saved = ui.ImageSaveHelper.save_images(picture, filename_prefix, io.FolderType.output, cls)
        folder = Path(folder_paths.get_output_directory(), saved[0].subfolder)
        (folder / saved[0].filename).with_suffix(".md").write_text(text, encoding="utf-8")
        show(cls.hidden.unique_id, words)
        shown = ui.SavedImages(saved).as_dict()
        return io.NodeOutput(samples, text, picture, ui={**shown, "text": [text]})
