"""Compress the teacher's token embeddings to the width of the adapter."""

from pathlib import Path

import torch
from trainer import checkpoints, config, materials, packs, seed_table, teachers
from trainer.job import job, log
from trainer.teachers.synthetic import Synthetic

with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    records = {record.id: record for record in map(materials.read_record, snakemake.input.materials)}
    shape = settings.adapter
    if settings.precompute.teacher == "synthetic":
        teacher = "synthetic"
        embeddings = Synthetic(shape.vocabulary, shape.teacher_dim, shape.queries).embeddings()
    else:
        teacher = records["teacher"].digest
        embeddings = teachers.embeddings(packs.get(settings.pack).teacher, Path(records["teacher"].path))
    table = seed_table.compress(embeddings, shape.width)
    config.write_stage_settings(settings, "seed_table")
    meta = {"teacher": teacher, "width": shape.width, "vocabulary": len(table)}
    checkpoints.save(Path(snakemake.output[0]), {"table": table}, meta)
    log.info("compressed %d embeddings of %d to %d", *embeddings.shape, shape.width)
