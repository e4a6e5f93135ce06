"""A made-up teacher for smoke runs: no files, any size, and targets that can be learnt from the prompt."""

from zlib import crc32

import torch
from torch import Tensor

END = 1
_RANK = 64
_POSITIONS = 1024


class Synthetic:
    """A row is a fixed random vector of its token, plus one of its position, plus half the row before it.

    Ids are hashes of words, so that a prompt and its rows have to do with each other; everything follows from the
    sizes alone.
    """

    def __init__(self, vocabulary: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(4321)
        self.vocabulary, self.dim = vocabulary, dim
        # The table as a product of two factors: at 32128 x 4096 it would take half a gigabyte.
        self.codes = torch.randn(vocabulary, _RANK, generator=generator)
        self.basis = torch.randn(_RANK, dim, generator=generator) / _RANK**0.5
        self.positions = torch.randn(_POSITIONS, dim, generator=generator) / 8

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """One id a word, then the end marker 1; 0 and 1 are no word's."""
        ids = [[2 + crc32(word.encode()) % (self.vocabulary - 2) for word in prompt.split()] for prompt in prompts]
        return [[*words[: queries - 1], END] for words in ids]

    @torch.no_grad()
    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Rows [B, P, dim], f32, of ids [B, P] (P at most 1024); a row depends on no later one, so none is masked."""
        codes = self.codes.to(ids.device)[ids]
        rows = codes @ self.basis.to(ids.device) + self.positions[: ids.shape[1]].to(ids.device)
        rows[:, 1:] += 0.5 * rows[:, :-1].clone()
        return rows

    def embeddings(self) -> Tensor:
        """The table that rows are made from."""
        return self.codes @ self.basis
