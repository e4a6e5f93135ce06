"""The exported file, loaded from its tensor names as the engine does, scored on the val and probe shards."""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from trainer import adapters, checkpoints, devices, export, packs, probe, scoring
from trainer.adapters import Adapter
from trainer.batches import Batch
from trainer.config import Settings
from trainer.corpus_files import Sample
from trainer.errors import TrainerError
from trainer.shards import Shard, to_rebuild


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
    probes: Sequence[Path] = (),
) -> dict:
    """Score a file.

    Args:
        settings: of the run.
        gguf: the file.
        mean: the mean teacher row of the train split, [D].
        checkpoint: what it was exported from, a best or state checkpoint, for the round trip; None: without.
        val: shards.
        samples: of the shards, by id.
        probes: shards of the probe split.

    Returns:
        The content of eval.json. In the pack's metric are `baseline_cos`, what always answering with the mean row would
        have; `roundtrip_cos`, the agreement of file and checkpoint; and `probe_cos`, the mean over the kinds of probe
        prompts, each of which `probe` has with its own figures.

    Raises:
        TrainerError: the file is another run's (which Snakemake, going by times, may take for this one's), or a probe
            shard is damaged.
    """
    export.refuse_anothers(gguf, settings.run, "nothing was scored")
    keys = export.read_keys(gguf)
    device = devices.pick(settings.evaluate.device)
    mean, metric = mean.to(device), packs.get(settings.pack).metric
    shards = [Shard(path) for path in val]

    def batches(shards: list[Shard], only: Container[str] | None = None) -> Iterator[tuple[list[str], Batch]]:
        return scoring.batches(shards, settings.train.batch_size, settings.adapter.queries, only)

    def always_the_mean(batch: Batch) -> torch.Tensor:
        return mean.expand(len(batch.target), -1)

    def scored(shards: list[Shard], only: Container[str] | None = None) -> tuple[scoring.Scores, dict[str, float]]:
        scores = scoring.score(predict, batches(shards, only), mean, metric)
        baseline = scoring.score(always_the_mean, batches(shards, only), mean, metric)
        return scores, scores.metrics() | {"baseline_cos": baseline.metrics()[metric]}

    predict = scoring.predictor(load_adapter(gguf, device), None)
    scores, metrics = scored(shards)
    if checkpoint is not None:
        weights, scale = checkpoints.unpack(checkpoints.load(checkpoint)[0])
        reference = scoring.predictor(adapters.of(weights).to(device), scale.to(device))
        center = mean if metric == "cos_centered" else torch.zeros_like(mean)
        metrics["roundtrip_cos"] = _agreement(predict, reference, batches(shards), center)
    others, kinds = _whole(probes), {}
    for kind, ids in _by_kind(others, samples).items():
        found, figures = scored(others, ids)
        kinds[kind] = {
            "samples": found.samples,
            "cos": figures[metric],
            "baseline_cos": figures["baseline_cos"],
            "worst": _worst(found, 1, samples)[0],
        }
    if kinds:
        metrics["probe_cos"] = fmean(kind["cos"] for kind in kinds.values())
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
        "worst": _worst(scores, settings.evaluate.worst, samples),
        "probe": kinds,
    }


def _whole(files: Sequence[Path]) -> list[Shard]:
    """Shards that nobody has read since they were written."""
    shards = [Shard(file) for file in files]
    for shard in shards:
        if shard.damaged():
            raise to_rebuild(shard.path, "damaged")
    return shards


def _by_kind(shards: list[Shard], samples: dict[str, Sample]) -> dict[str, set[str]]:
    """Ids of probe samples by kind, of the kinds that there are some of."""
    ids = {id for shard in shards for id in shard.header["ids"]}
    kinds = {kind: {id for id in ids if samples[id].source == kind} for kind in probe.KINDS}
    return {kind: own for kind, own in kinds.items() if own}


def _worst(scores: scoring.Scores, count: int, samples: dict[str, Sample]) -> list[dict[str, Any]]:
    """The samples with the lowest figures, the worst first."""
    lowest = sorted(scores.by_sample.items(), key=lambda item: (item[1], item[0]))[:count]
    return [{"id": id, "cos": cos, **_shown(samples.get(id))} for id, cos in lowest]


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
