"""The files of a LoRA, from a checkpoint: for diffusers, for ComfyUI and ggk, as GGUF, and the JSON beside them."""

from pathlib import Path
from typing import Any

import torch

from trainer import checkpoints, packs
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.export import copied
from trainer.files import digest, read_json
from trainer.lora import families, files

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def export_best(settings: Settings, materials: list[dict[str, Any]], best: Path, out: Path) -> None:
    """Write the best checkpoint as the run's files, and copy them to `export.copy_to`.

    Args:
        settings: the run's.
        materials: the records of what it is made from.
        best: the checkpoint.
        out: the file for diffusers, the first of `settings.exports`; the others are beside it.

    Raises:
        TrainerError: a file there is another run's, a value cannot be written, or the disk is full.
    """
    lora, about = read(settings, materials, best, "best")
    written = [out, *map(Path, settings.exports[1:])]
    with copied(settings, *written, refuse=lambda path, run, _: files.refuse_anothers(path, str(run))):
        files.write_all(out, lora, about)


def weights(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
    """Of a checkpoint, `<module>.lora_A.weight` and `<module>.lora_B.weight`, f32."""
    return checkpoints.part(tensors, "model.")


def read(
    settings: Settings, materials: list[dict[str, Any]], checkpoint: Path, which: str
) -> tuple[files.Lora, files.About]:
    """What a checkpoint gives, ready for files, and what they say of themselves.

    Raises:
        TrainerError: the checkpoint was trained with another LoRA than the settings say, or has a bad value.
    """
    tensors, meta = checkpoints.load(checkpoint)
    family, trained = families.get(packs.get(settings.pack).family), meta["made_from"]["lora"]
    (base,) = (record for record in materials if record["role"] == "base")
    corpus = read_json(Path(settings.folder) / "corpus.json")
    lora = files.folded(weights(tensors), family, trained["alpha"], DTYPES[settings.export.dtype])
    about = files.About(
        name=str(settings.export.name),
        run=str(settings.run),
        alpha=trained["alpha"],
        base=base["repository"] or Path(base["path"]).name,
        base_sha256=base["digest"],
        dataset_sha256=corpus["digest"],
        settings_sha256=digest(meta["made_from"]),
        steps=meta["step"],
        planned_steps=meta["steps"],
        checkpoint=which,
        resolution=settings.pictures.resolution or family.resolution,
        pictures=corpus["train"]["pictures"],
        dead=len(files.dead(family, lora.modules, _config(base, family.part).get("num_layers", 0))),
        prediction=_config(base, "scheduler").get("prediction_type") if family.objective == "diffusion" else None,
        trigger=settings.pictures.instance_prompt,
        attention=meta["made_from"].get("attention"),
    )
    return lora, about


def _config(base: dict[str, Any], part: str) -> dict[str, Any]:
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    try:
        return read_json(Path(base["path"]) / part / name)
    except TrainerError:
        return {}
