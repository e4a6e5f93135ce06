"""The token-aligned adapter: a row for each of the student's tokens, which read each other; with pictures, or not.

With pictures, the student's token of a picture's slot is what `vision_proj` makes of a row of the engine's vision
tower, and the adapter reads that row too.
"""

import torch
from torch import Tensor, nn

from trainer.adapters.layers import Attention, Stack, mlp
from trainer.batches import Batch


class Block(nn.Module):
    """Attention among the tokens of a sample, in both directions, and MLP; each pre-normed and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_self, self.ln_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = Attention(width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """[T, W] -> [T, W], samples of these lengths one after another."""
        x = x + self.self_attn.within(self.ln_self(x), lengths)
        return x + self.mlp(self.ln_mlp(x))


class Frozen(nn.Module):
    """A matrix that belongs to the adapter and is not trained."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, columns))


class TokenAligned(Stack):
    """The states, plus the tower's rows where there are some, through the blocks, to what is added to `skip(states)`.

    Initial weights: `out_proj` 0, so that `skip` alone gives the first rows, torch's defaults elsewhere. `vision_proj`
    takes part in nothing here: it is handed on with the file, for the engine to make the student's embeddings with.
    """

    def __init__(self, student_dim: int, teacher_dim: int, width: int, depth: int, vision_dim: int | None) -> None:
        super().__init__()
        self.in_proj = nn.Linear(student_dim, width)
        self.vision_proj = Frozen(student_dim, vision_dim) if vision_dim else None
        self.vis_in = nn.Linear(vision_dim, width, bias=False) if vision_dim else None
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_out = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, teacher_dim)
        self.skip = nn.Linear(student_dim, teacher_dim)
        for parameter in self.out_proj.parameters():
            nn.init.zeros_(parameter)

    def forward(self, batch: Batch) -> Tensor:
        """[R, teacher_dim]: the rows of the tokens that the batch asks for."""
        x = self.in_proj(batch.student)
        if self.vis_in is not None:
            x = x.index_add(0, batch.vision_at, self.vis_in(batch.vision).to(x.dtype))
        x = self.through(x, batch.lengths)
        return self.out_proj(self.ln_out(batch.wanted(x))) + self.skip(batch.wanted(batch.student))
