"""The resampler: query slots that read the student's states; seeded with the teacher's token ids, or not.

Module names are the engine's tensor names without the `adapter.` prefix. The engine attends over all Q slots, pads
included and unmasked, and over exactly the prompt's student rows; so does `forward`, with padded rows masked.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIM = 64


class Attention(nn.Module):
    """Multi-head attention with heads of 64 and biases everywhere, no rope, scale 1/sqrt(64)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """X [B, Q, W], source [B, L, W], mask [B, 1, 1, L] True where a source row is real -> [B, Q, W]."""

        def heads(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        out = scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(source)), heads(self.v(source)), attn_mask=mask
        )
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention among the slots, cross-attention to the student, MLP; each pre-normed and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_self, self.ln_q, self.ln_kv, self.ln_mlp = (nn.LayerNorm(width) for _ in range(4))
        self.self_attn, self.cross_attn = Attention(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Q [B, Q, W], kv [B, L, W] -> [B, Q, W]."""
        own = self.ln_self(q)
        q = q + self.self_attn(own, own)
        q = q + self.cross_attn(self.ln_q(q), self.ln_kv(kv), mask)
        return q + self.mlp(self.ln_mlp(q))


def kind(tensors: Iterable[str]) -> str:
    """The kind of adapter that tensors of these names are, decided as the engine does."""
    return "seeded_resampler" if "t5_embed.weight" in tensors else "resampler"


class Resampler(nn.Module):
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

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> "Resampler":
        """The network that engine tensors describe, from their names and shapes alone, as the engine reads them.

        `tensors` are the file's, without the `adapter.` prefix; weights are widened to f32.

        Raises:
            KeyError, RuntimeError: a tensor is missing, unexpected or of another shape.
        """
        depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        queries, width = tensors["query"].shape
        vocabulary = len(tensors["t5_embed.weight"]) if kind(tensors) == "seeded_resampler" else None
        with torch.device("meta"):
            adapter = cls(
                *(tensors["in_proj.weight"].shape[1], tensors["out_proj.weight"].shape[0]),
                *(width, depth, queries, vocabulary),
            )
        adapter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return adapter.requires_grad_(False).eval()

    def forward(self, student: torch.Tensor, mask: torch.Tensor | None, slots: torch.Tensor | None) -> torch.Tensor:
        """Run the trunk.

        Args:
            student: [B, L, student_dim] states.
            mask: [B, L] bool, True at real rows; None when all are.
            slots: [B, Q] int64 token ids, 0 at pads; None where slots are not seeded.

        Returns:
            [B, Q, W], for `head`.
        """
        kv = self.in_proj(student)
        q = self.query.expand(len(student), -1, -1)
        if self.t5_embed is not None:
            q = q + self.t5_embed(slots)
        for block in self.blocks:
            q = block(q, kv, None if mask is None else mask[:, None, None, :])
        return q

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., teacher_dim]; applied to the real slots only."""
        return self.out_proj(self.ln_out(rows))
