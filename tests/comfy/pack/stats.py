"""The statistics wire of the pack under test, as ui output."""

from comfy_api.latest import io


class TestStatsReport(io.ComfyNode):
    """Passes samples through, after the sampler, and gives what the last run's statistics hold."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestStatsReport",
            category="testing",
            is_output_node=True,
            not_idempotent=True,
            inputs=[io.Latent.Input("samples"), io.Custom("TRTLLM_STATS").Input("stats")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, stats):
        run = stats.last
        if run is None:
            return io.NodeOutput(samples, ui={"sites": [], "declined": []})
        sites = [
            {
                "layer": site.layer,
                "role": site.role,
                "step": site.step,
                "timestep": site.timestep,
                "calls": site.calls,
                "sparse_calls": site.sparse_calls,
                "skipped": site.skipped_tiles,
                "total": site.total_tiles,
                "backends": dict(site.backends),
            }
            for site in run.sites.values()
        ]
        declined = [{"reason": reason, "calls": n} for reason, n in run.declined.items()]
        return io.NodeOutput(samples, ui={"sites": sites, "declined": declined, "runs": [len(stats.runs)]})
