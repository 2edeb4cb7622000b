"""API-format prompts, built node by node.

    graph = Graph()
    model = graph.load("wan_t2v")
    model = graph.add("TRTLLMAttentionPatch", model=model, backend="auto", token_order="cubes")
    saved = graph.save(graph.sample(model, "wan_t2v", steps=3))
    run = server.run(graph)
    run.latent(saved)
"""

from dataclasses import dataclass

WAN_LATENT = "EmptyHunyuanLatentVideo"  # 16 channels, 8 pixels and 4 frames to a latent: Wan 2.1's too

# kind of tiny model -> (latent node, inputs of TestConditioning that it needs)
SAMPLING = {
    "wan_t2v": (WAN_LATENT, {"width": 4096}),
    "wan_i2v": (WAN_LATENT, {"width": 4096, "image_tokens": 257, "image_width": 1280}),
    "wan_vace": (WAN_LATENT, {"width": 4096}),
    "wan_camera": (WAN_LATENT, {"width": 4096, "image_tokens": 257, "image_width": 1280, "extra": "wan_camera"}),
    "wan_s2v": (WAN_LATENT, {"width": 4096, "extra": "wan_s2v"}),
    "wan_humo": (WAN_LATENT, {"width": 4096, "extra": "wan_humo"}),
    "wan_animate": (WAN_LATENT, {"width": 4096, "image_tokens": 257, "image_width": 1280, "extra": "wan_animate"}),
    "hunyuan_10": (WAN_LATENT, {"width": 4096, "pooled_width": 768}),
    "hunyuan_15": ("EmptyHunyuanVideo15Latent", {"width": 3584}),
}


@dataclass(frozen=True)
class Node:
    """A node of a Graph. As an input of another it means its first output; node[1] its second."""

    id: str

    def __getitem__(self, index):
        return [self.id, index]


class Graph:
    """Nodes in the order they were added. Ids are "1", "2", ..."""

    def __init__(self):
        self.nodes = {}

    def add(self, class_type, /, **inputs) -> Node:
        """Add a node; an input may be a value, a Node or an output such as node[1]. None is left out."""
        node = Node(str(len(self.nodes) + 1))
        self.nodes[node.id] = {
            "class_type": class_type,
            "inputs": {
                name: value[0] if isinstance(value, Node) else value
                for name, value in inputs.items()
                if value is not None
            },
        }
        return node

    def prompt(self) -> dict:
        """What POST /prompt takes."""
        return self.nodes

    def load(self, kind, weight_dtype="default") -> Node:
        """The stock Load Diffusion Model on one of tiny_models.KINDS, or on a file name."""
        name = f"{kind}.safetensors" if kind in SAMPLING else kind
        return self.add("UNETLoader", unet_name=name, weight_dtype=weight_dtype)

    def latent(self, kind, width=64, height=64, length=5, batch=1) -> Node:
        """An empty video latent. 64 x 64 x 5 is 2 x 4 x 4 = 32 tokens for Wan and HunyuanVideo 1.0."""
        return self.add(SAMPLING[kind][0], width=width, height=height, length=length, batch_size=batch)

    def conditioning(self, kind, latent, tokens=24, seed=1, **options) -> Node:
        """Random CONDITIONING with all that the kind of model expects; see TestConditioning in ../pack."""
        needs = dict(SAMPLING[kind][1])
        if needs.get("extra"):
            needs["latent"] = latent
        return self.add("TestConditioning", tokens=tokens, seed=seed, **{**needs, **options})

    def sample(
        self, model, kind, *, steps=3, cfg=5.0, seed=7, sampler="euler", scheduler="simple", denoise=1.0,
        width=64, height=64, length=5, batch=1, conditioning=None, negative=None,
    ) -> Node:  # fmt: skip
        """KSampler on an empty latent with random conditioning; returns the KSampler.

        conditioning: options of TestConditioning for both prompts; negative: for the negative alone.
        """
        latent = self.latent(kind, width, height, length, batch)
        options = conditioning or {}
        return self.add(
            "KSampler", model=model, latent_image=latent, seed=seed, steps=steps, cfg=cfg, sampler_name=sampler,
            scheduler=scheduler, denoise=denoise,
            positive=self.conditioning(kind, latent, **{"seed": 1, **options}),
            negative=self.conditioning(kind, latent, **{**options, "seed": 2, **(negative or {})}),
        )  # fmt: skip

    def save(self, samples, prefix="test") -> Node:
        """SaveLatent, for Run.latent."""
        return self.add("SaveLatent", samples=samples, filename_prefix=prefix)
