"""Made-up teachers for smoke runs: no files, any size, and targets that can be learnt from the sample."""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from trainer.chat_templates import Prompt
from trainer.reference_images import FRAMES, MERGE, PATCH
from trainer.streaming import Part, State, put
from trainer.teachers.qwen3_vl import Contract, spliced

END = 1
_RANK = 64
_POSITIONS = 1024
_WORDS = 4096  # ids where no vocabulary is asked for


class Synthetic:
    """Rows of random vectors, one a word, that are fixed by the sizes alone.

    Ids are hashes of words, so that a prompt and its rows have to do with each other. With a vocabulary, a row is the
    vector of its token, plus one of its position, plus half the row before it. Without one there are `queries` rows:
    the mean of the prompt's vectors, plus half the vector of word q modulo their number, plus one of the position q.
    Rows are f32; a prompt has at most 1024 ids, and `queries` is at most 1024.
    """

    weights = None

    def __init__(self, vocabulary: int | None, dim: int, queries: int) -> None:
        generator = torch.Generator().manual_seed(4321)
        self.vocabulary, self.dim = vocabulary, dim
        self.rows = None if vocabulary else queries
        # The table as a product of two factors: at 32128 x 4096 it would take half a gigabyte.
        self.codes = torch.randn(vocabulary or _WORDS, _RANK, generator=generator)
        self.basis = torch.randn(_RANK, dim, generator=generator) / _RANK**0.5
        self.positions = torch.randn(_POSITIONS, dim, generator=generator) / 8
        self.parts = [Part("rows", _Rows(self), {})]

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """One id a word, then the end marker 1; 0 and 1 are no word's."""
        ids = [[2 + crc32(word.encode()) % (len(self.codes) - 2) for word in prompt.split()] for prompt in prompts]
        return [[*words[: queries - 1], END] for words in ids]

    def embeddings(self) -> Tensor:
        """The table that rows are made from, [vocabulary, dim]."""
        return self.codes @ self.basis


class _Rows(nn.Module):
    def __init__(self, teacher: Synthetic) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, state: State) -> State:
        """A row depends on no later one, so that padding needs no mask."""
        teacher, ids, lengths = self.teacher, state["ids"], state["lengths"]
        codes = teacher.codes.to(ids.device)[ids]
        if teacher.rows:
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            mean = (codes * real[..., None]).sum(1) / lengths[:, None]
            word = torch.arange(teacher.rows, device=ids.device) % lengths[:, None]
            codes = mean[:, None] + codes.gather(1, word[..., None].expand(-1, -1, _RANK)) / 2
        rows = codes @ teacher.basis.to(ids.device) + teacher.positions[: codes.shape[1]].to(ids.device)
        if not teacher.rows:
            rows[:, 1:] += 0.5 * rows[:, :-1].clone()
        return {"rows": rows}


class SyntheticPictures:
    """Rows that are fixed by the sizes alone, as those of `Synthetic`; each has to do with its token and all pictures.

    A picture's row is made of the mean colours of its four patches and of their squares. A token's row is the vector of
    its id and of its position, plus half the row before it and half the mean of all rows of pictures, and for one that
    stands for a piece of a picture, what that is. What it has in common with `qwen3_vl.Qwen3Vl` is described there.
    """

    rows = None
    vocabulary = None
    weights = None
    dtype = torch.float32

    def __init__(self, dim: int, vision_dim: int, contract: Contract) -> None:
        generator = torch.Generator().manual_seed(4321)
        self.contract, self.dim, self.vision_dim = contract, dim, vision_dim
        self.widths = {"vision": vision_dim}
        self.colours = torch.randn(2 * 3 * MERGE**2, vision_dim, generator=generator)
        self.codes = torch.randn(_WORDS, _RANK, generator=generator)
        self.positions = torch.randn(_RANK, _RANK, generator=generator) / 8
        self.basis = torch.randn(_RANK, dim, generator=generator) / _RANK**0.5
        self.mix = torch.randn(vision_dim, dim, generator=generator) / vision_dim**0.5
        self.vision_parts = [Part("colours", _Colours(self), {})]
        self.parts = [Part("rows", _PictureRows(self), {})]

    def batch(self, prompts: Sequence[Prompt], pictures: Sequence[Sequence[State]]) -> State:
        """{"ids", "vision_at", "vision"} of a batch of samples."""
        return spliced(prompts, pictures, self.widths, self.dtype)


class _Colours(nn.Module):
    def __init__(self, teacher: SyntheticPictures) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, state: State) -> State:
        colours = state["patches"].float().unflatten(-1, (3, FRAMES * PATCH**2)).mean(-1)
        colours = colours.unflatten(1, (-1, MERGE**2)).flatten(2)
        return {"vision": torch.cat([colours, colours.square()], dim=-1) @ self.teacher.colours.to(colours.device)}


class _PictureRows(nn.Module):
    def __init__(self, teacher: SyntheticPictures) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, state: State) -> State:
        """A row depends on no later token, so that padding needs no mask."""
        teacher, ids = self.teacher, state["ids"]
        codes, positions, basis, mix = (
            tensor.to(ids.device) for tensor in (teacher.codes, teacher.positions, teacher.basis, teacher.mix)
        )
        numbers = torch.arange(ids.shape[1], device=ids.device)
        rows = (codes[ids % _WORDS] + positions[numbers % _RANK]) @ basis
        rows[:, 1:] += 0.5 * rows[:, :-1].clone()
        if state["vision"].shape[1]:
            seen = state["vision"] @ mix
            count = (state["vision_at"] >= 0).sum(1, keepdim=True).clamp_min(1)
            rows += 0.5 * seen.sum(1, keepdim=True) / count[..., None]
            put(rows, state["vision_at"], seen, add=True)
        return {"rows": rows}
