"""Teachers: prompts to the rows an adapter learns to give. One file a kind; `load` finds it by name."""

from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_bidirectional_mask

from trainer.errors import TrainerError
from trainer.streaming import Part, State, check
from trainer.weights import Weights

Kind = Literal["t5", "bert", "llada", "qwen3_vl_mageflow", "qwen3_vl_qwen_image"]


class Teacher(Protocol):
    """What precompute asks of a teacher; `trainer.streaming` runs it.

    dim: size of a row.
    vocabulary: number of token ids that can seed a slot; None where slots are not seeded.
    rows: rows of every prompt; None: one for each of its ids.
    weights: what the parts are read from; None where they hold their values.
    parts: its steps. The first reads {"ids": [B, P] int64, padded on the right with 0, "lengths": [B] int64}, the last
        gives {"rows": [B, R, dim]}; rows of padding mean nothing, and padding changes no other row.
    """

    dim: int
    vocabulary: int | None
    rows: int | None
    weights: Weights | None
    parts: list[Part]

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt, its template included.

        At least one; where slots are seeded at most `queries`, the end marker last.
        """


def load(kind: Kind, path: Path | str, dtype: torch.dtype) -> Teacher:
    """A teacher from the folder of its snapshot; its weights are not read yet.

    Raises:
        TrainerError: the snapshot is incomplete or damaged, or `dtype` is too narrow for this teacher.
    """
    teacher = import_module(f"trainer.teachers.{kind}").load(Path(path), dtype)
    check(teacher.parts, teacher.weights)
    return teacher


def embeddings(kind: Kind, path: Path | str) -> Tensor:
    """The token embeddings of a teacher with seeded slots, [vocabulary, dim], f32 on the CPU.

    Raises:
        TrainerError: the snapshot has no such tensor.
    """
    weights, name = embedding_table(kind, path)
    return weights.tensor(name).float()


def embedding_table(kind: Kind, path: Path | str) -> tuple[Weights, str]:
    """The stored tensors of a teacher, and the name of its token embeddings.

    Raises:
        TrainerError: the snapshot has no such tensor.
    """
    weights = Weights(Path(path))
    names = import_module(f"trainer.teachers.{kind}").EMBEDDINGS
    prefix = weights.prefix(*names)
    return weights, next(prefix + name for name in names if prefix + name in weights.tensors)


def contract(kind: Kind) -> Any:
    """What a model of the engine makes of samples with pictures: the `qwen3_vl.Contract` of this kind."""
    return import_module(f"trainer.teachers.{kind}").CONTRACT


def read_config(kind: type[PretrainedConfig], path: Path) -> PretrainedConfig:
    """The config.json of a snapshot.

    Raises:
        TrainerError: it cannot be read, or is of another kind of model.
    """
    try:
        values, _ = kind.get_config_dict(str(path), local_files_only=True)
        config = kind.from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TrainerError(f"{path / 'config.json'} cannot be used ({reason}); get the teacher again") from error
    if values.get("model_type", kind.model_type) != kind.model_type:
        raise TrainerError(f"{path} holds a model of the type {values['model_type']}, not {kind.model_type}")
    config._attn_implementation = "sdpa"
    return config


def on_meta(kind: type[nn.Module], *arguments: object, dtype: torch.dtype) -> nn.Module:
    """A module without values, for inference in `dtype`."""
    with torch.device("meta"):
        return kind(*arguments).to(dtype).eval().requires_grad_(False)


def sources(module: nn.Module, prefix: str) -> dict[str, tuple[str, ...]]:
    """Every parameter of a module as the one stored tensor that is called like it, after `prefix`."""
    return {name: (prefix + name,) for name, _ in module.named_parameters()}


def mask(config: PretrainedConfig, state: State) -> Tensor | None:
    """What transformers' layers take to keep padding from being seen; None where there is none."""
    hidden, lengths = state["hidden"], state["lengths"]
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return create_bidirectional_mask(config=config, inputs_embeds=hidden, attention_mask=real.long())


def check_vocabulary(path: Path, ids: int, embeddings: int) -> None:
    """Refuse a tokenizer with more ids than the model has embeddings.

    Raises:
        TrainerError: the two do not belong together.
    """
    if ids > embeddings:
        raise TrainerError(
            f"the teacher in {path} has {embeddings} token embeddings but a tokenizer of {ids} ids: its files do not "
            "belong together; get it again"
        )
