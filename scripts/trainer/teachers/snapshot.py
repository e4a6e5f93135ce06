"""Reading a teacher's snapshot: a folder with config.json and safetensors, as `save_pretrained` writes it."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from trainer.errors import TrainerError


def model(
    kind: type[PreTrainedModel], path: Path, dtype: torch.dtype, device: torch.device | str, **options: bool
) -> PreTrainedModel:
    """Load a model of the class `kind`, frozen, with every one of its weights from the snapshot.

    Raises:
        TrainerError: the snapshot cannot be read or lacks weights; transformers alone makes up what is missing.
    """
    # What it would print is either checked here or of no interest.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded, report = kind.from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TrainerError(f"the teacher in {path} cannot be loaded ({_first_line(error)}); get it again") from error
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TrainerError(f"the teacher in {path} lacks the weights {', '.join(missing[:3])}{more}; get it again")
    return loaded.to(device).eval().requires_grad_(False)


def tensor(path: Path, names: tuple[str, ...]) -> Tensor:
    """The first of `names` that the snapshot has, with any prefix, in its stored dtype on the CPU.

    Raises:
        TrainerError: it has none of them, or cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    try:
        # With an index, only what it names counts: other files may lie beside it.
        for index in path.glob("*.safetensors.index.json"):
            files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        stored = {}
        for file in files:
            with safe_open(file, "pt") as weights:
                stored |= dict.fromkeys(weights.keys(), file)
        for name in names:
            for key, file in stored.items():
                if f".{key}".endswith(f".{name}"):
                    with safe_open(file, "pt") as weights:
                        return weights.get_tensor(key)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TrainerError(f"the teacher in {path} cannot be read ({_first_line(error)}); get it again") from error
    raise TrainerError(f"the teacher in {path} has no tensor {' or '.join(names)} in its safetensors; get it again")


def mask(ids: Tensor, lengths: Tensor) -> Tensor:
    """[B, P] int64: 1 at ids of a prompt, 0 beyond its length."""
    return (torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]).long()


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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
