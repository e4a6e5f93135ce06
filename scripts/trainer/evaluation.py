"""The exported file, loaded from its tensor names as the engine does, scored on the val shards."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from trainer import checkpoints, devices, export, scoring
from trainer.adapters.resampler import SeededResampler
from trainer.batches import Batch
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.shards import Shard
from trainer.standardization import Standardization


def load_adapter(path: Path, device: torch.device) -> SeededResampler:
    """The adapter of a GGUF file.

    Raises:
        TrainerError: its tensors are not those of a seeded resampler.
    """
    tensors = export.read_tensors(path)
    try:
        return SeededResampler.of(tensors).to(device)
    except (KeyError, RuntimeError, ValueError) as error:
        raise TrainerError(f"{path} does not hold a seeded resampler ({error}); export it again") from None


def evaluate(settings: Settings, gguf: Path, checkpoint: Path | None, val: list[Path], texts: dict[str, str]) -> dict:
    """Score a file.

    Args:
        settings: of the run.
        gguf: the file.
        checkpoint: what it was exported from, a best or state checkpoint, for the round trip and the baseline.
        val: shards.
        texts: prompts by sample id.

    Returns:
        The content of eval.json.

    Raises:
        TrainerError: the file is another run's (which Snakemake, going by times, may take for this one's).
    """
    export.refuse_anothers(gguf, settings.run, "nothing was scored")
    keys = export.read_keys(gguf)
    device = devices.pick(settings.evaluate.device)
    shards = [Shard(path) for path in val]
    queries, size = settings.adapter.queries, settings.train.batch_size
    predict = scoring.predictor(load_adapter(gguf, device), None)
    scores = scoring.score(predict, shards, size, queries, device)
    metrics = scores.metrics()
    if checkpoint is not None:
        weights, scale = checkpoints.unpack(checkpoints.load(checkpoint)[0])
        scale = scale.to(device)
        reference = scoring.predictor(SeededResampler.of(weights).to(device), scale)
        metrics["roundtrip_cos"] = _agreement(predict, reference, shards, size, queries, device)
        metrics["baseline_cos"] = _baseline(scale, shards, size, queries, device)
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
        "worst": [{"id": id, "text": texts.get(id, ""), "cos": cos} for id, cos in worst],
    }


@torch.inference_mode()
def _agreement(one: Any, other: Any, shards: list[Shard], size: int, queries: int, device: torch.device) -> float:
    """Mean cosine between the rows of two predictors."""
    total, rows = 0.0, 0
    for _, batch in scoring.batches(shards, size, queries):
        batch = batch.to(device)
        cosine = cosine_similarity(one(batch).float(), other(batch).float(), dim=-1)
        total, rows = total + cosine.double().sum().item(), rows + len(cosine)
    return total / rows


def _baseline(scale: Standardization, shards: list[Shard], size: int, queries: int, device: torch.device) -> float:
    """The cosine of always answering with the mean teacher row of the train split."""

    def mean(batch: Batch) -> torch.Tensor:
        return scale.target_mean.expand(len(batch.target), -1)

    return scoring.score(mean, shards, size, queries, device).metrics()["cos"]
