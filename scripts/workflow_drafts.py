"""The example workflows: their nodes, in groups and columns, and their notes.

`make_workflows.py` lays them out in the real frontend. Model files are those of ComfyUI's own
templates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROMPT = "A red fox trots along a snowy ridge at sunrise, its breath visible in the cold air, slow tracking shot."
NEGATIVE = "overexposed, static, blurred details, subtitles, watermark, worst quality, low quality"
UMT5 = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"


@dataclass
class Draft:
    """One workflow. groups: title -> columns -> entries; an entry is a node id or a note's text."""

    name: str
    nodes: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    titles: dict = field(default_factory=dict)

    def column(self, group: str) -> None:
        """Begin a column; what is added from now on stands in it."""
        self.groups.setdefault(group, []).append([])

    def note(self, text: str) -> None:
        self._place({"note": text})

    def add(self, class_type: str, /, title: str | None = None, **inputs) -> Output:
        """Add a node; returns its first output."""
        node_id = str(len(self.nodes) + 1)
        values = {name: v.link if isinstance(v, Output) else v for name, v in inputs.items() if v is not None}
        self.nodes[node_id] = {"class_type": class_type, "inputs": values}
        if title:
            self.titles[node_id] = title
        self._place({"node": node_id})
        return Output(node_id)

    def _place(self, entry: dict) -> None:
        list(self.groups.values())[-1][-1].append(entry)


@dataclass(frozen=True)
class Output:
    """An output of a node; output[1] is its second."""

    node: str
    index: int = 0

    def __getitem__(self, index: int) -> Output:
        return Output(self.node, index)

    @property
    def link(self) -> list:
        return [self.node, self.index]


def _models(draft, unet, shift=8.0, title=None):
    model = draft.add("UNETLoader", unet_name=unet, weight_dtype="default", title=title)
    return draft.add("ModelSamplingSD3", model=model, shift=shift)


def _wan_text(draft):
    clip = draft.add("CLIPLoader", clip_name=UMT5, type="wan", device="default")
    positive = draft.add("CLIPTextEncode", clip=clip, text=PROMPT, title="Prompt")
    negative = draft.add("CLIPTextEncode", clip=clip, text=NEGATIVE, title="Negative prompt")
    return positive, negative


def _wan_latent(draft, width=832, height=480, length=33):
    return draft.add("EmptyHunyuanLatentVideo", width=width, height=height, length=length, batch_size=1)


def _sampler(
    draft, model, positive, negative, latent, steps=30, cfg=6.0, sampler="uni_pc", seed=82628696717253, title=None
):
    return draft.add(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=latent, seed=seed, steps=steps,
        cfg=cfg, sampler_name=sampler, scheduler="simple", denoise=1.0, title=title,
    )  # fmt: skip


def _video(draft, samples, prefix, vae_name="wan_2.1_vae.safetensors", fps=16.0, vae=None):
    vae = vae or draft.add("VAELoader", vae_name=vae_name)
    images = draft.add("VAEDecode", samples=samples, vae=vae)
    video = draft.add("CreateVideo", images=images, fps=fps)
    draft.add("SaveVideo", video=video, filename_prefix=f"video/{prefix}", format="auto", codec="auto")
    return images


def _gate(draft, model, cutoff=0.9, steps=30, title=None):
    return draft.add(
        "TRTLLMTimestepGate", model=model, disabled_until_timestep=cutoff, steps=steps, scheduler="simple",
        denoise=1.0, title=title,
    )  # fmt: skip


def _skip(draft, gate=None, ignore=None, threshold=0.01, target=0.5, calibration=None, title=None):
    mode = "threshold" if calibration is None else "calibrated"
    return draft.add(
        "TRTLLMSkipSoftmax", mode=mode, threshold=threshold, target_sparsity=target, calibration=calibration,
        gate=gate, ignore=ignore, title=title,
    )  # fmt: skip


def _patch(draft, model, title=None, **wires):
    return draft.add("TRTLLMAttentionPatch", model=model, backend="auto", token_order="cubes", title=title, **wires)


def _report(draft, samples, patch, prefix):
    return draft.add("TRTLLMAttentionReport", samples=samples, stats=patch[1], filename_prefix=f"attention/{prefix}")


def wan21_t2v():
    d = Draft("wan21_t2v_skip_softmax")
    d.column("1  Model and text")
    d.note(
        "## Wan 2.1 with Skip-Softmax\n\nThe patch sits between the model and the sampler. Everything on its left is "
        "optional: without Skip-Softmax it only chooses a backend.\n\n- **Timestep Gate**: drag the line. Steps above "
        "it stay dense.\n- **Layer Ignore List**: click or sweep layers that stay dense.\n- **Skip-Softmax**: a "
        "larger λ skips more."
    )
    model = _models(d, "wan2.1_t2v_1.3B_fp16.safetensors")
    d.column("1  Model and text")
    positive, negative = _wan_text(d)
    d.column("2  Attention")
    gate = _gate(d, model)
    ignore = d.add("TRTLLMLayerIgnoreList", model=model, patterns="blocks.0.self_attn\nblocks.29.self_attn")
    d.column("2  Attention")
    patch = _patch(d, model, skip_softmax=_skip(d, gate, ignore))
    d.column("3  Sample")
    samples = _sampler(d, patch, positive, negative, _wan_latent(d))
    d.column("4  Video and report")
    samples = _report(d, samples, patch, "wan21_t2v")
    _video(d, samples, "wan21_t2v")
    return d


def wan22_t2v():
    d = Draft("wan22_t2v_two_experts_calibrated")
    d.column("1  Models and text")
    d.note(
        "## Wan 2.2: two experts, each with its own curve\n\nCalibrate each expert once (the calibration workflow "
        "shows how) or choose a checkpoint that ModelOpt calibrated with **path** on Load Calibration: component "
        "*transformer* is the high noise expert, *transformer_2* the low noise one.\n\nThe high noise expert runs "
        "first; most of its steps lie above the gate's line and stay dense."
    )
    high = _models(d, "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", title="High noise expert")
    low = _models(d, "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", title="Low noise expert")
    d.column("1  Models and text")
    positive, negative = _wan_text(d)
    d.column("2  Attention")
    gate = _gate(d, high, 0.94, 20)
    high_curve = d.add(
        "TRTLLMLoadCalibration", name="wan22_t2v_high_noise.json", component="transformer", path="", title="High noise curve"
    )
    low_curve = d.add(
        "TRTLLMLoadCalibration", name="wan22_t2v_low_noise.json", component="transformer_2", path="", title="Low noise curve"
    )
    d.column("2  Attention")
    high_patch = _patch(d, high, "Patch, high noise", skip_softmax=_skip(d, gate, target=0.4, calibration=high_curve))
    low_patch = _patch(d, low, "Patch, low noise", skip_softmax=_skip(d, gate, target=0.6, calibration=low_curve))
    d.column("3  Sample")
    settings = {
        "steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple", "positive": positive,
        "negative": negative, "noise_seed": 392459563371087,
    }  # fmt: skip
    latent = d.add("KSamplerAdvanced", model=high_patch, latent_image=_wan_latent(d, 640, 640, 81), add_noise="enable",
                   start_at_step=0, end_at_step=10, return_with_leftover_noise="enable", title="High noise steps", **settings)  # fmt: skip
    samples = d.add("KSamplerAdvanced", model=low_patch, latent_image=latent, add_noise="disable", start_at_step=10,
                    end_at_step=10000, return_with_leftover_noise="disable", title="Low noise steps", **settings)  # fmt: skip
    d.column("4  Video and report")
    samples = _report(d, samples, low_patch, "wan22_t2v_low_noise")
    _video(d, samples, "wan22_t2v")
    return d


def wan21_i2v():
    d = Draft("wan21_i2v_skip_softmax")
    d.column("1  Model, image and text")
    d.note(
        "## Wan 2.1 image to video\n\nThe same patch. In an image-to-video model the text and the image each have a "
        "cross-attention of their own; both are on the ignore list here: their few keys fill hardly a tile."
    )
    model = _models(d, "wan2.1_i2v_480p_14B_fp16.safetensors")
    image = d.add("LoadImage", image="example.png")
    vision = d.add("CLIPVisionEncode", image=image, crop="none",
                   clip_vision=d.add("CLIPVisionLoader", clip_name="clip_vision_h.safetensors"))  # fmt: skip
    d.column("1  Model, image and text")
    positive, negative = _wan_text(d)
    vae = d.add("VAELoader", vae_name="wan_2.1_vae.safetensors")
    start = d.add("WanImageToVideo", positive=positive, negative=negative, vae=vae, clip_vision_output=vision,
                  start_image=image, width=512, height=512, length=33, batch_size=1)  # fmt: skip
    d.column("2  Attention")
    gate = _gate(d, model, 0.9, 20)
    ignore = d.add("TRTLLMLayerIgnoreList", model=model, patterns="blocks.0.self_attn\nblocks.*.cross_attn")
    d.column("2  Attention")
    patch = _patch(d, model, skip_softmax=_skip(d, gate, ignore))
    d.column("3  Sample and video")
    samples = _sampler(d, patch, start, start[1], start[2], steps=20)
    _video(d, samples, "wan21_i2v", vae=vae)
    return d


def hunyuanvideo15():
    d = Draft("hunyuanvideo15_t2v_skip_softmax")
    d.column("1  Model and text")
    d.note(
        "## HunyuanVideo 1.5\n\nText and video share one attention call per block here; tiles of video tokens are "
        "skipped. The text refiner and the first block are on the ignore list."
    )
    model = _models(d, "hunyuanvideo1.5_720p_t2v_fp16.safetensors", 7.0)
    d.column("1  Model and text")
    clip = d.add("DualCLIPLoader", clip_name1="qwen_2.5_vl_7b_fp8_scaled.safetensors",
                 clip_name2="byt5_small_glyphxl_fp16.safetensors", type="hunyuan_video_15", device="default")  # fmt: skip
    positive = d.add("CLIPTextEncode", clip=clip, text=PROMPT, title="Prompt")
    negative = d.add("CLIPTextEncode", clip=clip, text="", title="Negative prompt")
    d.column("2  Attention")
    gate = _gate(d, model, 0.9, 20)
    ignore = d.add("TRTLLMLayerIgnoreList", model=model, patterns="double_blocks.0\ntxt_in.*")
    d.column("2  Attention")
    patch = _patch(d, model, skip_softmax=_skip(d, gate, ignore))
    d.column("3  Sample")
    latent = d.add("EmptyHunyuanVideo15Latent", width=1280, height=720, length=121, batch_size=1)
    samples = _sampler(d, patch, positive, negative, latent, steps=20, sampler="euler")
    d.column("4  Video and report")
    samples = _report(d, samples, patch, "hunyuanvideo15")
    _video(d, samples, "hunyuanvideo15", "hunyuanvideo15_vae_fp16.safetensors", 24.0)
    return d


def sage_per_role():
    d = Draft("wan21_t2v_sage_and_skip_softmax_per_role")
    d.column("1  Model and text")
    d.note(
        "## SAGE and Skip-Softmax, but not in cross-attention\n\n**SAGE Quant** computes Q·K in INT8 or FP8; "
        "**Skip-Softmax** leaves tiles out; wired into one patch they run in one kernel.\n\n**Attention Role** gives "
        "one role settings of its own, which replace all of the patch's: here cross-attention stays at full "
        "precision on the best dense backend."
    )
    model = _models(d, "wan2.1_t2v_14B_fp8_scaled.safetensors")
    d.column("1  Model and text")
    positive, negative = _wan_text(d)
    d.column("2  Attention")
    gate = _gate(d, model)
    quant = d.add("TRTLLMSageQuant", dtype_qk="int8", q_block_size="1", k_block_size="16", dtype_vo="default", flashinfer_backend="")
    roles = d.add("TRTLLMAttentionRole", role="cross", backend="auto", title="Cross-attention: dense")
    d.column("2  Attention")
    patch = _patch(d, model, quant=quant, skip_softmax=_skip(d, gate), roles=roles)
    d.column("3  Sample")
    samples = _sampler(d, patch, positive, negative, _wan_latent(d))
    d.column("4  Video and report")
    samples = _report(d, samples, patch, "wan21_t2v_sage")
    _video(d, samples, "wan21_t2v_sage")
    return d


def calibrate():
    d = Draft("wan21_calibrate")
    d.column("1  Model and text")
    d.note(
        "## Calibrate a model once\n\nThe model samples dense, and counts what each of 22 thresholds would skip. "
        "Prompts, sizes and steps should be like those of later use; **every run adds to the counts**, so change "
        "prompt and seed and run a few times.\n\nSave Calibration writes models/skip_softmax/*filename*.json. Load "
        "Calibration then gives it to Skip-Softmax in mode *calibrated*. For Wan 2.2 do this once with each expert."
    )
    model = _models(d, "wan2.1_t2v_1.3B_fp16.safetensors")
    d.column("1  Model and text")
    positive, negative = _wan_text(d)
    d.column("2  Count")
    ignore = d.add("TRTLLMLayerIgnoreList", model=model, patterns="blocks.0.self_attn")
    counting = d.add("TRTLLMCalibrate", model=model, count_as="cubes", ignore=ignore)
    d.column("3  Sample")
    samples = _sampler(d, counting, positive, negative, _wan_latent(d))
    d.column("4  Save")
    d.add("TRTLLMSaveCalibration", run=counting[1], samples=samples, filename="wan21_t2v_1.3B")
    return d


def compare():
    d = Draft("wan21_t2v_compare_dense_and_sparse")
    d.column("1  Model and text")
    d.note(
        "## What does it change, and what does it save?\n\nThe same seed twice: dense, and with Skip-Softmax. "
        "**Compare** gives PSNR and SSIM of every frame, and LPIPS where its weights are installed; **Report** "
        "shows what was skipped, where and when.\n\nDense attention on another backend already differs in the last "
        "bits: that is the distance to judge others by."
    )
    model = _models(d, "wan2.1_t2v_1.3B_fp16.safetensors")
    d.column("1  Model and text")
    positive, negative = _wan_text(d)
    d.column("2  Attention")
    dense = _patch(d, model, "Dense")
    sparse = _patch(d, model, "With Skip-Softmax", skip_softmax=_skip(d, _gate(d, model)))
    d.column("3  Sample both")
    latent = _wan_latent(d)
    a = _sampler(d, dense, positive, negative, latent, title="Sample dense")
    b = _sampler(d, sparse, positive, negative, latent, title="Sample sparse")
    d.column("4  Compare")
    b = _report(d, b, sparse, "wan21_t2v_sparse")
    vae = d.add("VAELoader", vae_name="wan_2.1_vae.safetensors")
    images_a = d.add("VAEDecode", samples=a, vae=vae, title="Decode dense")
    images_b = d.add("VAEDecode", samples=b, vae=vae, title="Decode sparse")
    d.add("TRTLLMCompare", images_a=images_a, images_b=images_b)
    return d


DRAFTS = (wan21_t2v, wan22_t2v, wan21_i2v, hunyuanvideo15, sage_per_role, calibrate, compare)
