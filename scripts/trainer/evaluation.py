"""The exported file, loaded from its tensor names as the engine does, scored on the val shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from trainer import adapters, checkpoints, devices, export, packs, scoring
from trainer.adapters import Adapter
from trainer.batches import Batch
from trainer.config import Settings
from trainer.corpus_files import Sample
from trainer.errors import TrainerError
from trainer.shards import Shard


def load_adapter(path: Path, device: torch.device) -> Adapter:
    """The adapter of a GGUF file.

    Raises:
        TrainerError: its tensors are not those of an adapter.
    """
    tensors = export.read_tensors(path)
    try:
        return adapters.of(tensors).to(device)
    except (KeyError, RuntimeError, ValueError) as error:
        raise TrainerError(f"{path} does not hold an adapter ({error}); export it again") from None


def evaluate(
    settings: Settings,
    gguf: Path,
    mean: torch.Tensor,
    checkpoint: Path | None,
    val: list[Path],
    samples: dict[str, Sample],
) -> dict:
    """Score a file.

    Args:
        settings: of the run.
        gguf: the file.
        mean: the mean teacher row of the train split, [D].
        checkpoint: what it was exported from, a best or state checkpoint, for the round trip; None: without.
        val: shards.
        samples: of the val split, by id.

    Returns:
        The content of eval.json. `baseline_cos` is what always answering with the mean row would have, and
        `roundtrip_cos` the agreement of file and checkpoint, both in the pack's metric.

    Raises:
        TrainerError: the file is another run's (which Snakemake, going by times, may take for this one's).
    """
    export.refuse_anothers(gguf, settings.run, "nothing was scored")
    keys = export.read_keys(gguf)
    device = devices.pick(settings.evaluate.device)
    mean, metric = mean.to(device), packs.get(settings.pack).metric
    shards = [Shard(path) for path in val]

    def batches() -> Iterator[tuple[list[str], Batch]]:
        return scoring.batches(shards, settings.train.batch_size, settings.adapter.queries)

    def always_the_mean(batch: Batch) -> torch.Tensor:
        return mean.expand(len(batch.target), -1)

    predict = scoring.predictor(load_adapter(gguf, device), None)
    scores = scoring.score(predict, batches(), mean, metric)
    metrics = scores.metrics()
    metrics["baseline_cos"] = scoring.score(always_the_mean, batches(), mean, metric).metrics()[metric]
    if checkpoint is not None:
        weights, scale = checkpoints.unpack(checkpoints.load(checkpoint)[0])
        reference = scoring.predictor(adapters.of(weights).to(device), scale.to(device))
        center = mean if metric == "cos_centered" else torch.zeros_like(mean)
        metrics["roundtrip_cos"] = _agreement(predict, reference, batches(), center)
    worst = sorted(scores.by_sample.items(), key=lambda item: (item[1], item[0]))[: settings.evaluate.worst]
    return {
        "gguf": str(gguf),
        "pack": settings.pack,
        "run": settings.run,
        "kind": keys["adapter.kind"],
        "trained_steps": keys["adapter.trained_steps"],
        "planned_steps": keys["adapter.planned_steps"],
        "checkpoint": keys["adapter.checkpoint"],
        "teacher": keys["adapter.teacher"],
        "synthetic": keys["adapter.teacher"] == "synthetic",
        "metrics": metrics,
        "val_samples": scores.samples,
        "val_rows": scores.rows,
        "worst": [{"id": id, "cos": cos, **_shown(samples.get(id))} for id, cos in worst],
    }


def _shown(sample: Sample | None) -> dict[str, Any]:
    """What a list of samples says of one."""
    return {"text": sample.text if sample else "", "images": list(sample.images) if sample else []}


@torch.inference_mode()
def _agreement(
    one: scoring.Predictor, other: scoring.Predictor, batches: Iterator[tuple[list[str], Batch]], center: torch.Tensor
) -> float:
    """Mean cosine between the rows of two predictors, as seen from `center`."""
    total, rows = 0.0, 0
    for _, batch in batches:
        batch = batch.to(center.device)
        cosine = cosine_similarity(one(batch).float() - center, other(batch).float() - center, dim=-1)
        total, rows = total + cosine.double().sum().item(), rows + len(cosine)
    return total / rows
