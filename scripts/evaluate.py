"""Score the exported file on the val and probe shards."""

import math
from pathlib import Path

import torch
from trainer import checkpoints, config, corpus_files, evaluation, packs
from trainer.files import read_json, write_json
from trainer.job import job, log
from trainer.shard_index import listed

with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    files = snakemake.input
    settings = config.load(snakemake.params.settings)
    samples = {sample.id: sample for file in files.corpus for sample in corpus_files.read(Path(file))}
    index = read_json(files.index)
    val, probes = (listed(Path(settings.folder), index, split) for split in ("val", "probe"))
    mean = checkpoints.unpack(checkpoints.load(Path(files.trained))[0])[1].mean
    result = evaluation.evaluate(settings, Path(files.exported), mean, Path(files.trained), val, samples, probes)
    write_json(snakemake.output[0], result)
    metrics = result["metrics"]
    log.info(
        "val cosine %.4f (always answering with the mean: %.4f), of prompts of other kinds %.4f, rel_mse %.4f, round "
        "trip %.6f",
        *(metrics[packs.get(settings.pack).metric], metrics["baseline_cos"], metrics.get("probe_cos", math.nan)),
        *(metrics["rel_mse"], metrics["roundtrip_cos"]),
    )
