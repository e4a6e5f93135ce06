"""Compute the shards of one block."""

from pathlib import Path

import torch
from trainer import config, materials, packs, precompute, precompute_pictures
from trainer.control import Requests, discarding, only_one
from trainer.files import write_json
from trainer.job import job
from trainer.lora import precompute as lora_precompute
from trainer.packs.base import LoraPack
from trainer.slurm import put_back

with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    records = {record.id: record for record in map(materials.read_record, snakemake.input.materials)}
    split, number = snakemake.wildcards.split, int(snakemake.wildcards.block)
    requests = Requests(settings.folder)  # before the lock: whoever sees the lock can ask
    with (
        put_back(requests),
        only_one(settings.folder, f"precompute-{split}-{number:04d}"),
        discarding(requests, lambda: precompute.discard(Path(snakemake.output[0]))),
    ):
        given = settings, records, requests, snakemake.resources.mem_mb * 10**6
        if isinstance(packs.get(settings.pack), LoraPack):
            block = lora_precompute.Block(*given)
        elif snakemake.input.vision_proj:
            block = precompute_pictures.PictureBlock(*given, Path(snakemake.input.vision_proj[0]))
        else:
            block = precompute.Block(*given)
        content = block.fill(Path(snakemake.output[0]), number, snakemake.params.blocks, Path(snakemake.input.corpus))
        config.write_stage_settings(settings, "precompute")
        write_json(snakemake.output[0], content)
