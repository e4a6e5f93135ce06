"""The models of the four families, each a module that exports `Model`. Loading a module loads diffusers."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import TrainerError
from trainer.lora import families

if TYPE_CHECKING:
    from trainer.lora.models.base import Model


def get(family: str) -> "type[Model]":
    """The class of a family's models."""
    return import_module(f"trainer.lora.models.{family}").Model


def of(folder: Path) -> "Model":
    """The model of a pipeline's folder, by the class that its model_index.json names. No weight is read.

    Raises:
        TrainerError: there is no model_index.json, or the class is of no family.
    """
    index = folder / "model_index.json"
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{index} names no pipeline ({error!r}): give the folder of a diffusers pipeline") from error
    family = families.of_pipeline(str(pipeline))
    if family is None:
        known = ", ".join(families.get(name).pipeline for name in families.names())
        raise TrainerError(
            f"{index} is of the pipeline {pipeline}, which no pack trains a LoRA for: use one of {known}"
        )
    return get(family.name)(folder)
