"""Look at the exported file, and score it on the shards that were not trained on."""

import math
from pathlib import Path
from typing import Any

import torch
from trainer import checkpoints, config, corpus_files, evaluation, packs
from trainer.config import Settings
from trainer.files import read_json, write_json
from trainer.job import job, log
from trainer.packs.base import LoraPack
from trainer.shard_index import listed


def adapter(settings: Settings, files: Any) -> dict[str, Any]:
    """Scores of an adapter on the val and probe shards."""
    samples = {sample.id: sample for file in files.corpus for sample in corpus_files.read(Path(file))}
    index = read_json(files.index)
    val, probes = (listed(Path(settings.folder), index, split) for split in ("val", "probe"))
    mean = checkpoints.unpack(checkpoints.load(Path(files.trained))[0])[1].mean
    result = evaluation.evaluate(settings, Path(files.exported), mean, Path(files.trained), val, samples, probes)
    metrics = result["metrics"]
    log.info(
        "val cosine %.4f (always answering with the mean: %.4f), of prompts of other kinds %.4f, rel_mse %.4f, round "
        "trip %.6f",
        *(metrics[packs.get(settings.pack).metric], metrics["baseline_cos"], metrics.get("probe_cos", math.nan)),
        *(metrics["rel_mse"], metrics["roundtrip_cos"]),
    )
    return result


def lora(settings: Settings, files: Any) -> dict[str, Any]:
    """Pictures and grades of a LoRA."""
    from trainer.lora import verdict

    materials = read_json(Path(settings.folder) / "materials.json")["materials"]
    result = verdict.evaluate(settings, materials, Path(files.trained), Path(files.exported))
    log.info("%s", verdict.describe(result))
    return result


with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    look = lora if isinstance(packs.get(settings.pack), LoraPack) else adapter
    write_json(snakemake.output[0], look(settings, snakemake.input))
