"""The synthetic workload of the benchmarks: q and k whose scores fall off with 3-D distance, as in a local video head.

Tokens sit at p = (frame, row, column). A head has a bandwidth b = (.08, .05, .05) u, u uniform in [.5, 3], and 64
frequencies w ~ normal * b; a token's feature is [cos pw, sin pw] / 8; with amplitude a = sqrt(11 u' sqrt(128)), u'
uniform in [.5, 1.5], q = a feature + .3 noise and k the same with noise of its own. v is normal.
"""

import math

import torch

GRIDS = {"32k": (21, 30, 52), "75k": (21, 45, 80)}  # 480p and 720p, 81 frames: 32,760 and 75,600 tokens


def video_heads(grid, heads, head_dim=128, dtype=torch.bfloat16, device="cuda", seed=0):
    """q, k, v [1, tokens, heads, head_dim] for a grid (frames, rows, columns)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand((), device=device, generator=generator)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    axes = [torch.arange(size, device=device, dtype=torch.float32) for size in grid]
    position = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    tokens = position.shape[0]
    query = torch.empty(1, tokens, heads, head_dim, dtype=dtype, device=device)
    key, value = torch.empty_like(query), torch.empty_like(query)
    base = torch.tensor([0.08, 0.05, 0.05], device=device)
    for head in range(heads):
        bandwidth = base * uniform(0.5, 3.0)
        frequency = normal(3, head_dim // 2) * bandwidth[:, None]
        phase = position @ frequency
        amplitude = (11 * uniform(0.5, 1.5) * math.sqrt(head_dim)).sqrt()
        feature = amplitude * torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(head_dim // 2)
        query[0, :, head] = (feature + 0.3 * normal(tokens, head_dim)).to(dtype)
        key[0, :, head] = (feature + 0.3 * normal(tokens, head_dim)).to(dtype)
    value.copy_(normal(*value.shape))
    return query, key, value


class SampledRows:
    """float64 attention of some rows and heads, and the relative L2 error of an output against it.

    heads: how many, spread evenly; None takes the first, a fifth through and the last of the first half.
    """

    def __init__(self, query, key, value, *, rows=256, heads=None, seed=1):
        _, tokens, head_count, head_dim = query.shape
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, tokens, (rows,), generator=generator)
        self.rows[0] = tokens - 1
        self.rows = self.rows.to(query.device)
        if heads is None:
            self.heads = sorted({0, head_count // 5, max(head_count // 2 - 1, 0)})
        else:
            self.heads = torch.linspace(0, head_count - 1, heads).long().tolist()
        group = head_count // key.shape[2]
        self.expected = []
        for head in self.heads:
            scores = query[0, self.rows, head].double() @ key[0, :, head // group].double().T / math.sqrt(head_dim)
            self.expected.append(scores.softmax(-1) @ value[0, :, head // group].double())

    def errors(self, output) -> list[float]:
        """||output - expected|| / ||expected|| of every sampled head; inf where the output is not finite."""
        errors = []
        for head, expected in zip(self.heads, self.expected):
            error = (output[0, self.rows, head].double() - expected).norm() / expected.norm()
            errors.append(error.item() if torch.isfinite(error) else math.inf)
        return errors

    def error(self, output) -> float:
        """The mean of `errors`."""
        errors = self.errors(output)
        return sum(errors) / len(errors)
