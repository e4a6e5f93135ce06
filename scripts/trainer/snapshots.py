"""Step-tagged files of a run as it is now, and their list, snapshots.json."""

import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from trainer import checkpoints, control, evaluation, export
from trainer.config import Settings
from trainer.corpus_files import Sample
from trainer.errors import TrainerError
from trainer.files import read_json, write_json
from trainer.job import log
from trainer.packs import get as get_pack
from trainer.packs.base import LoraPack
from trainer.shard_index import listed, trained_on


def take(settings: Settings, materials: list[dict[str, Any]], samples: dict[str, Sample]) -> Path:
    """Write `<name>-step<N>-f16.gguf`, or the files of a LoRA, for `snapshot.at` and list it; gives the file.

    Raises:
        TrainerError: there is no such checkpoint; it says which there are.
    """
    run = Path(settings.folder)
    training = "train" in control.running(run)
    path, checkpoint = _find(run, settings.snapshot.at, training)
    if isinstance(get_pack(settings.pack), LoraPack):
        out, entry = _lora(settings, materials, path, checkpoint)
    else:
        out, entry = _adapter(settings, materials, path, checkpoint, samples, training)
    _list(run, out, entry | {"name": settings.export.name, "while_training": training})
    return out


def _lora(
    settings: Settings, materials: list[dict[str, Any]], path: Path, checkpoint: str
) -> tuple[Path, dict[str, Any]]:
    """The files; pictures are made of the run's own alone, since they take the whole base."""
    from trainer.lora import export as lora_export
    from trainer.lora import files

    meta = checkpoints.read_meta(path)
    _check_shards(Path(settings.folder), meta)
    checkpoint = "best" if checkpoint == "best" else f"step{meta['step']}"
    lora, about = lora_export.read(settings, materials, path, checkpoint)
    out = Path(settings.export.dir) / f"{settings.export.name}-step{meta['step']}{LoraPack.suffix}"
    files.write_all(out, lora, about)
    log.info("wrote %s", out)
    figures = {"val_loss": (meta.get("val") or {}).get("loss"), "best_val_loss": meta["best_loss"], "eval": None}
    return out, _entry(meta, checkpoint) | figures


def _adapter(
    settings: Settings,
    materials: list[dict[str, Any]],
    path: Path,
    checkpoint: str,
    samples: dict[str, Sample],
    training: bool,
) -> tuple[Path, dict[str, Any]]:
    run = Path(settings.folder)
    tensors, meta = checkpoints.load(path)
    _check_teacher(settings, _check_shards(run, meta))
    if "mean_row" in tensors:  # a kept step: the tensors of the file
        mean = tensors.pop("mean_row")
    else:  # a state or best checkpoint
        weights, scale = checkpoints.unpack(tensors)
        tensors, mean = checkpoints.exported(weights, scale), scale.mean
    if checkpoint != "best":
        checkpoint = f"step{meta['step']}"
    values = export.keys(settings, tensors, meta, materials, checkpoint, snapshot=True)
    out = Path(settings.export.dir) / f"{settings.export.name}-step{meta['step']}-f16.gguf"
    export.write_adapter(out, tensors, values)
    log.info("wrote %s", out)
    scores = None
    if settings.snapshot.evaluate:
        if training:  # the GPU is the trainer's
            settings.evaluate.device = "cpu"
        shards = listed(run, read_json(run / "shards.json"), "val")
        scores = evaluation.evaluate(settings, out, mean, None, shards, samples)["metrics"]
        log.info("val cosine %.4f", scores[get_pack(settings.pack).metric])
    figures = {"val_cos": values.get("adapter.val_cos"), "best_val_cos": meta["best_cos"], "eval": scores}
    return out, _entry(meta, values["adapter.checkpoint"]) | figures


def _entry(meta: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    step = meta["step"]
    return {"id": f"step{step}", "step": step, "planned_steps": meta["steps"], "checkpoint": checkpoint}


def _check_shards(run: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The records that the file's keys are taken from must be those that the checkpoint was trained with."""
    index = read_json(run / "shards.json")
    if meta["made_from"]["shards"] != trained_on(index):
        raise TrainerError(f"the shards of {run} changed after step {meta['step']} was trained: run training first")
    return index


def _check_teacher(settings: Settings, index: dict[str, Any]) -> None:
    trained, asked = (
        "synthetic" if it else "real" for it in (index["synthetic"], settings.precompute.teacher == "synthetic")
    )
    if trained != asked:
        raise TrainerError(
            f"{settings.folder} was trained on a {trained} teacher, and precompute.teacher is {asked!r}: nothing was "
            f"written; set precompute.teacher to {trained!r}"
        )


def _find(run: Path, at: str, training: bool) -> tuple[Path, str]:
    folder = run / "checkpoints"
    if at == "best":
        return folder / "best.safetensors", "best"
    if at == "newest":
        if training:
            control.request_snapshot(run)
        kept = checkpoints.kept(folder)
        candidates = [*kept[-1:], *([state] if (state := folder / "state.safetensors").exists() else [])]
        if not candidates:
            raise TrainerError(f"{run} has no checkpoint yet: start training, or wait for its first save")
        return max(candidates, key=lambda path: checkpoints.read_meta(path)["step"]), "newest"
    if not at.isdigit():
        raise TrainerError(f"setting `snapshot.at` is {at!r}: use newest, best, or the step of a kept checkpoint")
    for path in (checkpoints.kept_path(folder, int(at)), folder / "best.safetensors", folder / "state.safetensors"):
        if path.exists() and checkpoints.read_meta(path)["step"] == int(at):
            return path, "kept"
    steps = [str(checkpoints.read_meta(path)["step"]) for path in checkpoints.kept(folder)]
    raise TrainerError(f"{run} has no checkpoint of step {at}; kept steps are {', '.join(steps) or 'none'}")


def _list(run: Path, out: Path, entry: dict[str, Any]) -> None:
    entry |= {"path": str(out), "size": out.stat().st_size, "time": round(time.time(), 1)}
    path = run / "snapshots.json"
    with FileLock(control.folder(run) / "snapshots.lock"):
        entries = read_json(path)["snapshots"] if path.exists() else []
        entries = [old for old in entries if old["path"] != entry["path"]]
        write_json(path, {"snapshots": sorted([*entries, entry], key=lambda e: e["step"])})
