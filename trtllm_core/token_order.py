"""Token orders that make Skip-Softmax skip more: video tokens regrouped into compact 3-D cubes.

Self-attention does not care about the order of its tokens once positions are encoded in them (RoPE), so a
permutation of q, k, v, undone on the output, is exact. A KV tile that is a cube of neighbours instead of a strip of
one row has more alike scores, so more of them fall below the threshold together.
"""

from __future__ import annotations

import torch

CUBE = (4, 4, 8)  # frames, rows, columns: 128 tokens


def cube_permutation(grid, cube=CUBE) -> torch.Tensor:
    """int64 [frames * rows * columns]: which raster token stands at each place of the cube order.

    grid: (frames, rows, columns). Cubes follow each other in raster order, as do the tokens of a cube; at the far
    edges a cube is cut to what is left.
    """
    shape = [int(size) for size in grid]
    sort_keys = []
    for axis, size in enumerate(shape):
        coordinate = torch.arange(size).view([-1 if i == axis else 1 for i in range(3)])
        sort_keys.append((coordinate // cube[axis]).expand(shape))
    cubes = [-(-size // edge) for size, edge in zip(shape, cube)]
    cube_number = (sort_keys[0] * cubes[1] + sort_keys[1]) * cubes[2] + sort_keys[2]
    return torch.argsort(cube_number.reshape(-1), stable=True)


class TokenOrder:
    """The cube order of one sequence: `lead` tokens stay in front, then the grid's, and `tail` tokens stay last.

    Lead and tail are the tokens that are not video: text, reference images, audio. `end` is where the tail begins.
    """

    def __init__(self, grid, *, lead: int = 0, tail: int = 0, cube=CUBE, device="cpu"):
        grid, cube = tuple(grid), tuple(cube)
        if len(grid) != 3 or len(cube) != 3 or min(grid) < 1 or min(cube) < 1 or lead < 0 or tail < 0:
            raise ValueError(f"no token order for grid={grid}, cube={cube}, lead={lead}, tail={tail}")
        video = cube_permutation(grid, cube) + lead
        end = self.end = lead + video.numel()
        order = torch.cat([torch.arange(lead), video, torch.arange(end, end + tail)])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        # int32 is enough for any sequence and halves what a gather reads of the index
        self.order = order.to(device=device, dtype=torch.int32)
        self.inverse = inverse.to(device=device, dtype=torch.int32)

    def __len__(self) -> int:
        return self.order.numel()

    def _gather(self, tensor, index):
        if tensor.shape[1] != len(self):
            raise ValueError(f"the token order is of {len(self)} tokens, the tensor {tuple(tensor.shape)} has others")
        return tensor.index_select(1, index)

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads, head_dim] in cube order; a new tensor."""
        return self._gather(tensor, self.order)

    def apply_to_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask that broadcasts to [..., tokens, tokens], both in cube order."""
        for axis in (-1, -2):
            if mask.ndim >= -axis and mask.shape[axis] == len(self):
                mask = mask.index_select(axis, self.order)
        return mask

    def undo(self, tensor: torch.Tensor) -> torch.Tensor:
        """Back to the model's order; `undo(apply(x))` equals x."""
        return self._gather(tensor, self.inverse)


class TokenOrders:
    """The orders of one run, each built once and kept on its device until `clear`."""

    def __init__(self):
        self._orders: dict[tuple, TokenOrder] = {}

    def get(self, grid, *, lead: int = 0, tail: int = 0, cube=CUBE, device="cpu") -> TokenOrder:
        key = (tuple(grid), lead, tail, tuple(cube), torch.device(device))
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = TokenOrder(grid, lead=lead, tail=tail, cube=cube, device=device)
        return order

    def clear(self) -> None:
        self._orders.clear()
