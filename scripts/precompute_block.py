"""Compute the shards of one block."""

from pathlib import Path
from typing import Any

import torch
from trainer import config, materials, packs
from trainer.control import Requests, discarding, only_one
from trainer.files import write_json
from trainer.job import job
from trainer.packs.base import LoraPack
from trainer.slurm import put_back


def block(settings: config.Settings, *given: Any) -> Any:
    """What fills a block of the pack; only that is loaded, since there may be nothing to do."""
    if isinstance(packs.get(settings.pack), LoraPack):
        from trainer.lora.precompute import Block

        return Block(settings, *given)
    if snakemake.input.vision_proj:
        from trainer.precompute_pictures import PictureBlock

        return PictureBlock(settings, *given, Path(snakemake.input.vision_proj[0]))
    from trainer.precompute import Block

    return Block(settings, *given)


def discard() -> None:
    """Remove what there is of the block."""
    from trainer import precompute

    precompute.discard(Path(snakemake.output[0]))


with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    records = {record.id: record for record in map(materials.read_record, snakemake.input.materials)}
    split, number = snakemake.wildcards.split, int(snakemake.wildcards.block)
    requests = Requests(settings.folder)  # before the lock: whoever sees the lock can ask
    with (
        put_back(requests),
        only_one(settings.folder, f"precompute-{split}-{number:04d}"),
        discarding(requests, discard),
    ):
        fill = block(settings, records, requests, snakemake.resources.mem_mb * 10**6).fill
        content = fill(Path(snakemake.output[0]), number, snakemake.params.blocks, Path(snakemake.input.corpus))
        config.write_stage_settings(settings, "precompute")
        write_json(snakemake.output[0], content)
