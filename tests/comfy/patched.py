"""Graphs with the pack's nodes in them, and what their runs did."""

from dataclasses import dataclass

from harness.graphs import Graph


@dataclass
class Outcome:
    """One finished run: its latent, and the statistics of its patched calls."""

    latent: object
    sites: list
    declined: dict
    log: str

    @property
    def calls(self):
        return sum(site["calls"] for site in self.sites)

    def roles(self):
        """{(layer, role)} over all steps."""
        return {(site["layer"], site["role"]) for site in self.sites}

    def sparse_steps(self, layer):
        """Step -> whether the calls of `layer` skipped tiles."""
        return {s["step"]: s["sparse_calls"] > 0 for s in self.sites if s["layer"] == layer}

    def backends(self):
        return {name for site in self.sites for name in site["backends"]}


def patch(graph, model, *, backend="REFERENCE", token_order="cubes", threshold=None, gate=None, ignore=None, quant=None, roles=None):
    """The patch node with Skip-Softmax, gate, ignore list and SAGE wired as given; returns the node."""
    skip = None
    if threshold is not None:
        skip = graph.add(
            "TRTLLMSkipSoftmax", mode="threshold", threshold=threshold, target_sparsity=0.5,
            gate=None if gate is None else graph.add(
                "TRTLLMTimestepGate", disabled_until_timestep=gate, steps=20, scheduler="simple", denoise=1.0),
            ignore=None if ignore is None else graph.add("TRTLLMLayerIgnoreList", patterns=ignore),
        )  # fmt: skip
    if quant is not None:
        quant = graph.add("TRTLLMSageQuant", dtype_qk=quant, q_block_size="1", k_block_size="16", dtype_vo="default", flashinfer_backend="")
    return graph.add(
        "TRTLLMAttentionPatch", model=model, backend=backend, token_order=token_order, quant=quant, skip_softmax=skip, roles=roles,
    )  # fmt: skip


def run(server, kind, *, file=None, before=(), after=(), sampling=None, shift=None, **options) -> Outcome:
    """Sample `kind` patched with `options` of `patch`.

    before, after: (class, inputs) of nodes that take and give the model around the patch.
    sampling: options of Graph.sample. shift: a ModelSamplingSD3 in front. file: another checkpoint
    of the same kind.
    """
    graph = Graph()
    model = graph.load(file or kind)
    if shift is not None:
        model = graph.add("ModelSamplingSD3", model=model, shift=shift)
    for name, inputs in before:
        model = graph.add(name, model=model, **inputs)
    node = patch(graph, model, **options)
    model = node
    for name, inputs in after:
        model = graph.add(name, model=model, **inputs)
    sampled = graph.sample(model, kind, **(sampling or {}))
    report = graph.add("TestStatsReport", samples=sampled, stats=node[1])
    saved = graph.save(sampled)
    finished = server.run(graph)
    ui = finished.ui(report)
    declined = {entry["reason"]: entry["calls"] for entry in ui["declined"]}
    return Outcome(finished.latent(saved), ui["sites"], declined, finished.log)


def plain(server, kind, *, file=None, before=(), sampling=None, shift=None):
    """The latent of the same run without the pack's nodes."""
    graph = Graph()
    model = graph.load(file or kind)
    if shift is not None:
        model = graph.add("ModelSamplingSD3", model=model, shift=shift)
    for name, inputs in before:
        model = graph.add(name, model=model, **inputs)
    saved = graph.save(graph.sample(model, kind, **(sampling or {})))
    return server.run(graph).latent(saved)
