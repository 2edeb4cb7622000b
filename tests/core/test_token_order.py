import math

import pytest
import torch

from trtllm_core.token_order import TokenOrder, TokenOrders, cube_permutation


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 4, 8), (5, 6, 9), (3, 2, 17), (21, 30, 52)])
@pytest.mark.parametrize("cube", [(4, 4, 8), (1, 8, 8), (2, 3, 5)])
def test_every_token_stands_once_and_cubes_are_compact(grid, cube):
    order = cube_permutation(grid, cube)
    assert torch.equal(order.sort().values, torch.arange(math.prod(grid)))
    frame, rest = order // (grid[1] * grid[2]), order % (grid[1] * grid[2])
    numbers = torch.stack([frame // cube[0], rest // grid[2] // cube[1], rest % grid[2] // cube[2]], 1)
    changes = (numbers[1:] != numbers[:-1]).any(1).sum().item() + 1
    assert changes == len(numbers.unique(dim=0)) == math.prod(-(-size // edge) for size, edge in zip(grid, cube))


def test_a_whole_cube_comes_in_raster_order():
    order = cube_permutation((4, 4, 16))
    expected = [t * 64 + y * 16 + x for t in range(4) for y in range(4) for x in range(8)]
    assert order[:128].tolist() == expected


@pytest.mark.parametrize(("lead", "tail"), [(0, 0), (7, 0), (0, 3), (5, 2)])
def test_apply_and_undo(lead, tail):
    grid = (5, 6, 9)
    tokens = math.prod(grid) + lead + tail
    x = torch.randn(2, 3, tokens, 4).transpose(1, 2)  # [batch, tokens, heads, head_dim], heads first in memory
    order = TokenOrder(grid, lead=lead, tail=tail)
    assert len(order) == tokens
    y = order.apply(x)
    assert torch.equal(order.undo(y), x)
    assert torch.equal(y[:, :lead], x[:, :lead])
    assert torch.equal(y[:, tokens - tail :], x[:, tokens - tail :])
    assert torch.equal(y[:, lead : tokens - tail], x[:, lead : tokens - tail][:, cube_permutation(grid)])


def test_another_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="270 tokens"):
        TokenOrder((5, 6, 9)).apply(torch.zeros(1, 271, 1, 4))


@pytest.mark.parametrize("arguments", [dict(grid=(1, 2)), dict(grid=(0, 2, 2)), dict(grid=(1, 2, 2), lead=-1)])
def test_senseless_grids_are_refused(arguments):
    with pytest.raises(ValueError, match="no token order"):
        TokenOrder(**arguments)


def test_orders_are_built_once_and_dropped_together():
    orders = TokenOrders()
    first = orders.get((4, 4, 8), lead=2)
    assert orders.get([4, 4, 8], lead=2) is first
    assert orders.get((4, 4, 8), lead=3) is not first
    orders.clear()
    assert orders.get((4, 4, 8), lead=2) is not first
