"""A made-up teacher for smoke runs: no files, any size, and targets that can be learnt from the prompt."""

from zlib import crc32

import torch
from torch import Tensor

END = 1
_RANK = 64
_POSITIONS = 1024
_WORDS = 4096  # ids where no vocabulary is asked for


class Synthetic:
    """Rows of random vectors, one a word, that are fixed by the sizes alone.

    Ids are hashes of words, so that a prompt and its rows have to do with each other. With a vocabulary, a row is the
    vector of its token, plus one of its position, plus half the row before it. Without one there are `queries` rows:
    the mean of the prompt's vectors, plus half the vector of word q modulo their number, plus one of the position q.
    """

    def __init__(self, vocabulary: int | None, dim: int, queries: int) -> None:
        generator = torch.Generator().manual_seed(4321)
        self.vocabulary, self.dim, self.queries = vocabulary, dim, queries
        # The table as a product of two factors: at 32128 x 4096 it would take half a gigabyte.
        self.codes = torch.randn(vocabulary or _WORDS, _RANK, generator=generator)
        self.basis = torch.randn(_RANK, dim, generator=generator) / _RANK**0.5
        self.positions = torch.randn(_POSITIONS, dim, generator=generator) / 8

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """One id a word, then the end marker 1; 0 and 1 are no word's."""
        ids = [[2 + crc32(word.encode()) % (len(self.codes) - 2) for word in prompt.split()] for prompt in prompts]
        return [[*words[: queries - 1], END] for words in ids]

    @torch.no_grad()
    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Rows [B, P, dim] of ids [B, P] or, without a vocabulary, [B, queries, dim], f32; P and queries at most 1024.

        With a vocabulary a row depends on no later one, so none is masked.
        """
        codes = self.codes.to(ids.device)[ids]
        if not self.vocabulary:
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            mean = (codes * real[..., None]).sum(1) / lengths[:, None]
            word = torch.arange(self.queries, device=ids.device) % lengths[:, None]
            codes = mean[:, None] + codes.gather(1, word[..., None].expand(-1, -1, _RANK)) / 2
        rows = codes @ self.basis.to(ids.device) + self.positions[: codes.shape[1]].to(ids.device)
        if self.vocabulary:
            rows[:, 1:] += 0.5 * rows[:, :-1].clone()
        return rows

    def embeddings(self) -> Tensor:
        """The table that rows are made from."""
        return self.codes @ self.basis
