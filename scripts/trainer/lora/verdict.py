"""What a trained LoRA came to, as eval.json tells: losses with and without it, pictures from the same seeds, ladder."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoints, devices, packs
from trainer.config import Settings
from trainer.corpus_files import read
from trainer.errors import TrainerError
from trainer.files import read_json, write_json
from trainer.job import log
from trainer.lora import evaluation, export, families, files, ladder, models, network, precompute
from trainer.lora.conditions import Shard
from trainer.lora.evaluation import Shot
from trainer.lora.families import Family, Name
from trainer.lora.ladder import Expected
from trainer.lora.objective import BANDS
from trainer.materials import Record
from trainer.shard_index import listed

# A prompt that has nothing of what is learnt: the LoRA should change it less.
_OTHER = "a street with houses on a cloudy day"
_CAPTIONS = 4  # that are encoded again
_MAX_KEPT = 3  # earlier steps that pictures are made of
# By family, what pictures are usually made with: steps, guidance, and what the pipeline calls that.
_USUAL: dict[Name, tuple[int, float, str]] = {
    "sdxl": (25, 5.0, "guidance_scale"),
    "flux": (28, 3.5, "guidance_scale"),
    "qwen_image": (30, 4.0, "true_cfg_scale"),
    "z_image": (25, 4.0, "guidance_scale"),
}


def evaluate(
    settings: Settings,
    materials: list[dict[str, Any]],
    trained: Path,
    exported: Path,
    out: str = "eval",
    upto: int = families.RUNGS[-1],
) -> dict[str, Any]:
    """Load the exported file as its users do, and look at it, and at the course of training.

    Args:
        settings: the run's.
        materials: the records of what it is made from.
        trained: the checkpoint that was exported.
        exported: the file for diffusers.
        out: folder of the run that pictures go to.
        upto: the highest rung to judge, of those that training has reached.

    Returns:
        The content of eval.json.

    Raises:
        TrainerError: a file cannot be loaded, or is damaged; the base does not fit.
    """
    try:
        return _evaluated(settings, materials, trained, exported, out, upto)
    except torch.OutOfMemoryError:
        raise TrainerError(
            "out of memory while pictures were made, for which the base's network has to fit: set evaluate.device to "
            f"cpu, or do without, as {exported} is there"
        ) from None


def _evaluated(
    settings: Settings, materials: list[dict[str, Any]], trained: Path, exported: Path, out: str, upto: int
) -> dict[str, Any]:
    run, family = Path(settings.folder), families.get(packs.get(settings.pack).family)
    (base,) = (record for record in materials if record["role"] == "base")
    tensors, meta = checkpoints.load(trained)
    weights, made_from = export.weights(tensors), meta["made_from"]
    numbers = made_from["base_precision"]
    conditions = _conditions(settings, run, Record(**base), family)  # before the pipeline: both hold encoders
    device = devices.pick(settings.evaluate.device)
    dtype = network.DTYPES[numbers] if device.type == "cuda" else torch.float32
    pipeline = _pipeline(Path(base["path"]), family, dtype, device)
    part = getattr(pipeline, family.part)
    modules = network.targets(part, family, made_from["lora"]["targets"])
    wanted = evaluation.expected(family, part, modules, made_from["lora"]["rank"], export.DTYPES[settings.export.dtype])
    content, rungs = evaluation.evaluate(
        pipeline,
        exported,
        weights,
        made_from["lora"]["alpha"],
        _shots(settings, run),
        _options(settings, family),
        wanted,
        run / out,
        _kept(settings, materials, run / out, meta),
    )
    rungs += [conditions, *_course(settings, materials, run / out, meta, wanted, upto)]
    graded = ladder.to_json(rungs)
    for failure in ladder.failures(graded):
        log.warning("not passed: %s", failure)
    val = meta.get("val") or {}
    return {
        "pack": settings.pack,
        "run": settings.run,
        "kind": "lora",
        "family": family.name,
        "attention": content["attention"],
        "trained_steps": meta["step"],
        "planned_steps": meta["steps"],
        "checkpoint": "best",
        "metrics": {
            "val_loss": val.get("loss"),
            "base_loss": val.get("base_loss"),
            "shift": content["shift"],
            "reload": content["reload"],
            "spread": content["spread"],
        }
        | {f"val_loss_{band}": val.get(f"loss_{band}") for band in BANDS}
        | {f"base_loss_{band}": val.get(f"base_loss_{band}") for band in BANDS},
        "pictures": content,
        "ladder": graded,
    }


def refuse_unreachable(settings: Settings, rung: int) -> None:
    """Stop before training if it would end before a rung.

    Raises:
        TrainerError: it would.
    """
    if settings.train.steps < rung:
        raise TrainerError(
            f"train.steps is {settings.train.steps}, and training ends before the rung of {rung} steps: raise it"
        )


def judge(settings: Settings, rung: int) -> None:
    """Evaluate the step of a rung that training has kept, and leave ladder.json, and pictures in the folder `ladder`.

    Raises:
        TrainerError: it was not kept, or something does not hold: what, in numbers.
    """
    run = Path(settings.folder)
    materials = read_json(run / "materials.json")["materials"]
    kept = checkpoints.kept_path(run / "checkpoints", rung)
    if not kept.exists():
        raise TrainerError(f"{kept} is gone, and training is beyond it: move {kept.parent} away to train anew")
    file = _file(settings, materials, run / "ladder", rung, kept)
    graded = evaluate(settings, materials, kept, file, out="ladder", upto=rung)["ladder"]
    write_json(run / "ladder.json", graded | {"steps": rung})
    if not graded["passed"]:
        raise TrainerError(f"the rung of {rung} steps is not passed: {'; '.join(ladder.failures(graded))}")
    log.info("%d steps: all %d rungs are passed, see %s", rung, len(graded["rungs"]), run / "ladder.json")


def _pipeline(folder: Path, family: Family, dtype: torch.dtype, device: torch.device) -> Any:
    """The base's pipeline on a device; where it has no room for all of it, for the part that computes."""
    import diffusers
    from diffusers.utils import logging
    from transformers.utils import logging as of_transformers

    logging.disable_progress_bar()
    of_transformers.disable_progress_bar()
    pipeline = getattr(diffusers, family.pipeline).from_pretrained(
        folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    if device.type == "cuda" and _bytes(pipeline) > 0.8 * torch.cuda.mem_get_info(device)[0]:
        pipeline.enable_model_cpu_offload(device=device)
        return pipeline
    return pipeline.to(device)


def _bytes(pipeline: Any) -> int:
    modules = [it for it in pipeline.components.values() if isinstance(it, torch.nn.Module)]
    return sum(it.numel() * it.dtype.itemsize for module in modules for it in module.parameters())


def _conditions(settings: Settings, run: Path, base: Record, family: Family) -> ladder.Rung:
    """Whether some captions of the shards are what the base's encoders make of them now."""
    index, now = read_json(run / "shards.json"), precompute.made_from(settings, {base.id: base})
    device = devices.pick(settings.precompute.device)
    encoder = models.get(family.name)(Path(base.path)).text_encoder(
        devices.dtype(settings.precompute.teacher_dtype, device), device
    )
    texts = {row.id: row.text for row in read(run / "corpus" / "text.jsonl")}
    stored = ((shard, id) for path in listed(run, index, "text") for shard in [Shard(path)] for id in shard.items)
    kept = {texts[id]: shard.read(id) for shard, id in islice(stored, _CAPTIONS)}
    return evaluation.conditions(encoder, kept, *(f"{it['vae']} {it['encoders']}" for it in (index, now)))


def _shots(settings: Settings, run: Path) -> list[Shot]:
    """Prompts of the settings, or the first captions of the val split, with every seed; and one that has nothing."""
    prompts = settings.evaluate.prompts
    if not prompts:
        texts = dict.fromkeys(row.text for row in read(run / "corpus" / "val.jsonl") if row.text)
        prompts = [settings.pictures.instance_prompt] if settings.pictures.instance_prompt else list(texts)[:2]
    shots = [Shot(prompt, seed) for prompt in prompts or [""] for seed in settings.evaluate.seeds]
    return [*shots, Shot(_OTHER, settings.evaluate.seeds[0], learnt=False)]


def _options(settings: Settings, family: Family) -> dict[str, Any]:
    """What the pipeline is called with."""
    steps, guidance, name = _USUAL[family.name]
    asked, side = settings.evaluate, settings.pictures.resolution
    guidance = guidance if asked.guidance is None else asked.guidance
    return {"num_inference_steps": asked.steps or steps, name: guidance, "height": side, "width": side}


def _kept(
    settings: Settings, materials: list[dict[str, Any]], out: Path, meta: dict[str, Any]
) -> list[tuple[int, Path]]:
    """Files of some earlier steps of this training, written to a folder."""
    earlier = {step: path for step, path in _steps(out.parent, meta).items() if step < meta["step"]}
    chosen = list(earlier)[:: -(-len(earlier) // _MAX_KEPT)] if earlier else []
    return [(step, _file(settings, materials, out, step, earlier[step])) for step in chosen]


def _steps(run: Path, meta: dict[str, Any]) -> dict[int, Path]:
    """The checkpoints that were kept of a training, by step."""
    found = [(checkpoints.read_meta(path), path) for path in checkpoints.kept(run / "checkpoints")]
    return {it["step"]: path for it, path in found if it["made_from"] == meta["made_from"]}


def _file(settings: Settings, materials: list[dict[str, Any]], out: Path, step: int, checkpoint: Path) -> Path:
    """The file for diffusers of a kept step, written to a folder."""
    path = out / f"step-{step}.safetensors"
    files.write(path, *export.read(settings, materials, checkpoint, f"step{step}"))
    return path


def _course(
    settings: Settings, materials: list[dict[str, Any]], out: Path, meta: dict[str, Any], wanted: Expected, upto: int
) -> list[ladder.Rung]:
    """The rungs of 1, 20, 100 and 500 steps that training has reached."""
    run, family = out.parent, families.get(packs.get(settings.pack).family)
    summary, rungs, norm = read_json(run / "corpus.json"), [], 0.0
    pictures = summary["train"]["pictures"]
    reached = {step: path for step, path in _steps(run, meta).items() if step in families.RUNGS and step <= upto}
    for step, checkpoint in reached.items():
        told = checkpoints.read_meta(checkpoint)
        course = ladder.course(run / "metrics.csv", step, [told["val"][f"base_loss_{band}"] for band in BANDS])
        contents = files.contents(_file(settings, materials, out, step, checkpoint), family)
        if step == 1:
            rungs.append(ladder.first(course, ladder.Gradients(**told["told"]["gradients"]), contents, wanted))
        elif step == 20:
            rungs.append(ladder.twentieth(course))
        elif step == 100:
            norm = contents.norm
            rungs.append(ladder.hundredth(course, pictures))
        else:
            best = checkpoints.read_meta(run / "checkpoints" / "best.safetensors")
            held_out = (best["step"], best["val"]["loss"]) if summary["val"]["held_out"] else None
            rungs.append(ladder.five_hundredth(course, pictures, contents, wanted, norm, held_out))
    return rungs


def describe(found: dict[str, Any]) -> str:
    """What eval.json says, in a line."""
    metrics = found["metrics"]
    passed = sum(rung["passed"] for rung in found["ladder"]["rungs"])
    return (
        f"val loss {metrics['val_loss']:.4f} (base alone: {metrics['base_loss']:.4f}), pictures change by "
        f"{255 * metrics['shift']:.1f} of 255, {passed} of {len(found['ladder']['rungs'])} rungs passed"
    )
