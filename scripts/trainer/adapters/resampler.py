"""The resampler: query slots that read the student's states; seeded with the teacher's token ids, or not.

The engine attends over all Q slots, pads included and unmasked, and over exactly the prompt's student rows; so does
`forward`, with padded rows masked.
"""

import torch
from torch import Tensor, nn

from trainer.adapters.layers import Attention, Stack, mlp
from trainer.batches import Batch


class Block(nn.Module):
    """Self-attention among the slots, cross-attention to the student, MLP; each pre-normed and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_self, self.ln_q, self.ln_kv, self.ln_mlp = (nn.LayerNorm(width) for _ in range(4))
        self.self_attn, self.cross_attn = Attention(width), Attention(width)
        self.mlp = mlp(width)

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """Q [B, Q, W], kv [B, L, W] -> [B, Q, W]."""
        own = self.ln_self(q)
        q = q + self.self_attn(own, own)
        q = q + self.cross_attn(self.ln_q(q), self.ln_kv(kv), mask)
        return q + self.mlp(self.ln_mlp(q))


class Resampler(Stack):
    """Query slots, plus the seed of their token where there is a vocabulary, through the blocks, to teacher rows.

    Initial weights: queries N(0, 0.02^2), torch's defaults elsewhere; training starts the seed table from the teacher.
    """

    def __init__(
        self, student_dim: int, teacher_dim: int, width: int, depth: int, queries: int, vocabulary: int | None
    ) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.t5_embed = nn.Embedding(vocabulary, width) if vocabulary else None
        self.in_proj = nn.Linear(student_dim, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_out = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, teacher_dim)

    def forward(self, batch: Batch) -> Tensor:
        """[R, teacher_dim]: the rows of the slots that the batch asks for."""
        student, mask = batch.padded()
        kv, mask = self.in_proj(student), mask[:, None, None]
        q = self.query.expand(len(batch), -1, -1)
        if self.t5_embed is not None:
            q = q + self.t5_embed(batch.slots)
        q = self.through(q, kv, mask)
        return self.out_proj(self.ln_out(batch.wanted(q.flatten(0, 1))))
