"""Teachers: prompts to the rows an adapter learns to give. One file a kind; `load` finds it by name."""

from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.teachers import snapshot

Kind = Literal["t5", "bert", "llada"]


class Teacher(Protocol):
    """What precompute asks of a teacher.

    vocabulary: number of token ids.
    dim: size of a row.
    """

    vocabulary: int
    dim: int

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt with the end marker: at least one, at most `queries`, the end marker last."""

    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Rows of a batch.

        Args:
            ids: [B, P] int64, padded on the right with 0.
            lengths: [B] int64, the ids of each prompt; what is beyond them changes nothing.

        Returns:
            [B, P, dim]; rows beyond a prompt's length mean nothing.
        """

    def embeddings(self) -> Tensor:
        """The token embeddings, [vocabulary, dim], f32 on the CPU."""


def load(kind: Kind, path: Path | str, dtype: torch.dtype, device: torch.device | str) -> Teacher:
    """Load a teacher from the folder of its snapshot.

    Raises:
        TrainerError: the snapshot is incomplete or damaged, or `dtype` is too narrow for this teacher.
    """
    return import_module(f"trainer.teachers.{kind}").load(Path(path), dtype, device)


def embeddings(kind: Kind, path: Path | str) -> Tensor:
    """The token embeddings of a teacher, [vocabulary, dim], f32 on the CPU, without loading the rest of it.

    Raises:
        TrainerError: the snapshot has no such tensor.
    """
    names = import_module(f"trainer.teachers.{kind}").EMBEDDINGS
    return snapshot.tensor(Path(path), names).float()
