"""What adapters of all kinds are made of. Module names are the engine's tensor names without the `adapter.` prefix."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

HEAD_DIM = 64


class Attention(nn.Module):
    """Multi-head attention with heads of 64 and biases everywhere, no rope, scale 1/sqrt(64)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """X [B, Q, W], source [B, L, W], mask [B, 1, 1, L] True where a source row is real -> [B, Q, W]."""
        q, k, v = _heads(self.q(x)), _heads(self.k(source)), _heads(self.v(source))
        return self.o(_rows(_attention(q, k, v, mask)))

    def within(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Rows [T, W] of samples that stand one after another, each seeing those of its own sample -> [T, W].

        One sample after another: nothing is padded, and without a mask the fastest kernels are chosen.
        """
        q, k, v = (_heads(part(x)[None]).split(list(lengths), dim=2) for part in (self.q, self.k, self.v))
        samples = [_attention(*sample) for sample in zip(q, k, v, strict=True)]
        return self.o(_rows(torch.cat(samples, dim=2))[0])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B, H, Q, 64] for [B, H, Q, 64] and twice [B, H, L, 64]."""
    if q.device.type == "cpu" and q.requires_grad:
        # On a CPU, the backward pass of torch's fused kernel takes several times as long as that of plain products.
        scores = (q * HEAD_DIM**-0.5) @ k.mT
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _heads(rows: Tensor) -> Tensor:
    """[B, L, W] -> [B, H, L, 64]."""
    return rows.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """[B, H, L, 64] -> [B, L, W]."""
    return heads.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """What adapters of all kinds have in common: blocks, one after another.

    recompute: forget what blocks have inside, and compute it again in the backward pass: less memory, more time.
    compiled: have torch make kernels for the blocks, for training.
    """

    blocks: nn.ModuleList
    recompute = False
    compiled = False

    def through(self, x: Tensor, *more: Any) -> Tensor:
        """X through all blocks, which are given `more` as well."""
        for block in self.blocks:
            run = _compiled() if self.compiled and self.training else _plain
            x = checkpoint(run, block, x, *more, use_reentrant=False) if self.recompute else run(block, x, *more)
        return x


def _plain(block: nn.Module, x: Tensor, *more: Any) -> Tensor:
    return block(x, *more)


@cache
def _compiled() -> Callable[..., Tensor]:
    # For all blocks and sizes: numbers of samples and rows are variables of the kernels, not constants. Not before it
    # is wanted: torch takes seconds to load its compiler.
    return torch.compile(_plain, dynamic=True)


def mlp(width: int) -> nn.Sequential:
    """The MLP of a block: four times as wide inside, exact GELU."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
