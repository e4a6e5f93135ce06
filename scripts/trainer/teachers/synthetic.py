"""A made-up teacher for smoke runs: no files, any size, and targets that can be learnt from the prompt."""

from zlib import crc32

import torch
from torch import Tensor, nn

from trainer.streaming import Part, State

END = 1
_RANK = 64
_POSITIONS = 1024


class _Rows(nn.Module):
    def __init__(self, codes: Tensor, basis: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.codes, self.basis, self.positions = codes, basis, positions

    def forward(self, state: State) -> State:
        ids = state["ids"]
        codes = self.codes.to(ids.device)[ids]
        rows = codes @ self.basis.to(ids.device) + self.positions[: ids.shape[1]].to(ids.device)
        rows[:, 1:] += 0.5 * rows[:, :-1].clone()
        return {"rows": rows}


class Synthetic:
    """A row is a fixed random vector of its token, plus one of its position, plus half the row before it.

    Ids are hashes of words, so that a prompt and its rows have to do with each other; everything follows from the
    sizes alone. Rows are f32; a prompt has at most 1024 ids; a row depends on no later one.
    """

    rows = None
    weights = None

    def __init__(self, vocabulary: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(4321)
        self.vocabulary, self.dim = vocabulary, dim
        # The table as a product of two factors: at 32128 x 4096 it would take half a gigabyte.
        self.codes = torch.randn(vocabulary, _RANK, generator=generator)
        self.basis = torch.randn(_RANK, dim, generator=generator) / _RANK**0.5
        positions = torch.randn(_POSITIONS, dim, generator=generator) / 8
        self.parts = [Part("rows", _Rows(self.codes, self.basis, positions), {})]

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """One id a word, then the end marker 1; 0 and 1 are no word's."""
        ids = [[2 + crc32(word.encode()) % (self.vocabulary - 2) for word in prompt.split()] for prompt in prompts]
        return [[*words[: queries - 1], END] for words in ids]

    def embeddings(self) -> Tensor:
        """The table that rows are made from, [vocabulary, dim]."""
        return self.codes @ self.basis
