"""What carrying V's rounding errors saves, and what its limit is for: python benchmarks/value_rounding.py (CPU, float64)

"wide": relative error of the output from rounding V to e4m3 alone, V normal, weights a Gaussian over neighbouring keys.
"beside large": relative error of a key's V that stands beside one a hundred times larger. Limit 0 carries nothing.
"""

import torch

TOKENS, CHANNELS, ROWS = 20_000, 128, 64
LIMITS = (0.0, 0.125, 0.25, 0.5, float("inf"))
WIDTHS = (200, 1_400, 5_700)


def rounded(values, limit):
    """values [tokens, channels] in e4m3, each error going to the next of four tokens if at most `limit` of it."""
    step = values.abs().amax(0) / 416
    scaled = (values / step).reshape(-1, 4, values.shape[1])
    result, carry = torch.empty_like(scaled), torch.zeros_like(scaled[:, 0])
    for i in range(4):
        wanted = scaled[:, i] + torch.where(carry.abs() <= limit * scaled[:, i].abs(), carry, 0.0)
        result[:, i] = wanted.float().to(torch.float8_e4m3fn).double()
        carry = wanted - result[:, i]
    return result.reshape(values.shape) * step


def main():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(TOKENS, CHANNELS, generator=generator).bfloat16().double()
    uneven = values.clone()
    uneven[::4] *= 100
    small = torch.arange(TOKENS) % 4 != 0
    centres = torch.randint(0, TOKENS, (ROWS, 1), generator=generator)
    distance = (torch.arange(TOKENS) - centres).double()
    weights = [torch.exp(-((distance / width) ** 2)) for width in WIDTHS]
    weights = [w / w.sum(1, keepdim=True) for w in weights]
    keys = [f"wide, {(1 / (w**2).sum(1)).mean():,.0f} keys" for w in weights]
    print(f"| limit of the carry | {' | '.join(keys)} | beside large, mean | beside large, 99% |")
    print("| --- " * (len(keys) + 3) + "|")
    for limit in LIMITS:
        even = rounded(values, limit)
        errors = [((w @ even - w @ values).norm() / (w @ values).norm()).item() for w in weights]
        beside = ((rounded(uneven, limit) - uneven).norm(dim=1) / uneven.norm(dim=1))[small]
        cells = (*errors, beside.mean().item(), beside.quantile(0.99).item())
        print(f"| {limit:g} | {' | '.join(f'{cell:.4f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
