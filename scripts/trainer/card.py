"""The card of an adapter: the README.md that goes with its file to a repository of the hub.

It names no path of this machine, and the same run gives the same bytes.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from trainer import __version__, materials, results
from trainer.config import Settings
from trainer.files import sha256, write_text
from trainer.lora import families
from trainer.packs.base import LoraPack
from trainer.results import Result


def write_card(run_folder: Path, settings: Settings, out: Path) -> None:
    """Write the card of a finished run.

    Args:
        run_folder: the run's folder, with materials.json, corpus.json, shards.json and eval.json.
        settings: the run's settings.
        out: the Markdown file.

    Raises:
        TrainerError: a file that the card needs is missing or damaged.
    """
    result = results.read(run_folder, settings)
    page = results.environment(keep_trailing_newline=True)
    page.filters["code"] = code
    template, metadata, more = (_of_lora if isinstance(result.pack, LoraPack) else _of_adapter)(result)
    text = page.get_template(template).render(
        version=__version__,
        settings=settings,
        pack=result.pack,
        evaluation=result.evaluation,
        metrics=result.evaluation["metrics"],
        corpus=result.corpus,
        shards=result.shards,
        materials=[
            record | {"license": _license(settings, record), "file": Path(record["path"]).name}
            for record in result.materials
        ],
        **more,
    )
    write_text(out, f"---\n{metadata.to_yaml()}\n---\n\n{text}")


def _file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def _of_adapter(result: Result) -> tuple[str, ModelCardData, dict[str, Any]]:
    companion = result.pack.companion
    return (
        "card.md.j2",
        _metadata(result),
        {
            "figure": result.figure,
            "figures": result.figures,
            "probes": result.probes,
            "command": result.command(absolute=False),
            "reference": result.reference(absolute=False),
            "gguf": _file(result.exported),
            # A source is a preset, or a file or folder of the user's: where those lie is nobody's business.
            "sources": [(Path(name).name, counts) for name, counts in result.corpus["sources"].items()],
            "companion": Path(result.settings.companion or "").name,
            "companion_license": companion and _license(result.settings, {"id": companion.id, "package": None}),
        },
    )


def _of_lora(result: Result) -> tuple[str, ModelCardData, dict[str, Any]]:
    settings, family = result.settings, families.get(result.pack.family)
    base = next(record for record in result.materials if record["role"] == "base")
    uses = ("diffusers", "ComfyUI and ggk", "ggk", "programs that list LoRAs")
    metadata = ModelCardData(
        license=settings.publish.license,
        base_model=base["repository"],
        base_model_relation="adapter" if base["repository"] else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["gguf-trainer", "lora", "text-to-image", family.name],
        instance_prompt=settings.pictures.instance_prompt,
        model_name=settings.export.name,
    )
    return (
        "lora_card.md.j2",
        metadata,
        {
            "family": family,
            "base": base["repository"] or Path(base["path"]).name,
            "files": [_file(Path(it)) | {"about": use} for it, use in zip(settings.exports, uses, strict=True)],
        },
    )


def _license(settings: Settings, record: dict[str, Any]) -> str:
    found = materials.license_of(settings, record)
    return f"{found}, as its {'package' if record['package'] else 'repository'} says" if found else "not known"


def _metadata(result: Result) -> ModelCardData:
    """What the hub reads of a card."""
    settings, pack, evaluation = result.settings, result.pack, result.evaluation
    figures = evaluation["metrics"]

    def repositories(*roles: str) -> list[str] | None:
        found = [it["repository"] for it in result.materials if it["role"] in roles and it["repository"]]
        return list(dict.fromkeys(found)) or None

    def measured(kind: str, name: str, metric: str, value: float, about: str) -> EvalResult:
        return EvalResult(
            task_type="feature-extraction",
            dataset_type=kind,
            dataset_name=name,
            metric_type=metric,
            metric_name=about,
            metric_value=round(value, 6),
        )

    val, probe = (
        ("validation-prompts", "validation prompts of this run"),
        ("probe-prompts", "prompts of other kinds, the same for every run"),
    )
    evaluations = [
        measured(*val, "cosine_similarity", figures[pack.metric], result.figure),
        measured(*val, "cosine_similarity", figures["baseline_cos"], "mean baseline"),
        measured(*val, "relative_mse", figures["rel_mse"], "relative squared error"),
    ]
    if "probe_cos" in figures:
        evaluations.append(measured(*probe, "cosine_similarity", figures["probe_cos"], "cosine"))
    usable = bool(pack.command) and not evaluation["synthetic"]
    bases = repositories("teacher", "student")
    return ModelCardData(
        license=settings.publish.license,
        base_model=bases,
        base_model_relation="adapter" if bases else None,
        datasets=repositories("prompts", "images"),
        library_name="gguf",
        pipeline_tag="text-to-image" if usable else None,
        tags=["gguf-trainer", "adapter", "text-encoder", "distillation", pack.name, *(["ggk"] if usable else [])],
        model_name=settings.export.name,
        eval_results=evaluations,
    )


def code(text: str) -> str:
    """A name as code, in a cell of a table."""
    plain = " ".join(text.split()).replace("`", "'").replace("|", r"\|")
    return f"`{plain}`"
