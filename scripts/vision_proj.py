"""Fit what makes student embeddings of the rows of the teacher's tower."""

from pathlib import Path

import torch
from trainer import checkpoints, config, materials, packs, students, teachers, vision_proj
from trainer.job import job, log

with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    records = {record.id: record for record in map(materials.read_record, snakemake.input.materials)}
    shape, pack = settings.adapter, packs.get(settings.pack)
    meta = {"student": records["student"].digest, "ridge": vision_proj.RIDGE}
    if settings.precompute.teacher == "synthetic":
        weight = vision_proj.made_up(shape.student_dim, shape.vision_dim)
        meta |= {"teacher": "synthetic", "fit": None}
    else:
        info = students.inspect(records["student"].path)
        students.check(info, pack, shape.student_dim)
        weights, name = teachers.embedding_table(pack.teacher, Path(records["teacher"].path))
        count = min(info.vocabulary, weights.tensors[name].shape[0])
        weight, fit = vision_proj.fit(
            lambda start, stop: weights.rows(name, start, stop),
            lambda start, stop: students.embeddings(info, start, stop),
            count,
        )
        log.info("fitted over %d tokens: mean cosine %.4f to the student's embeddings", count, fit)
        meta |= {"teacher": records["teacher"].digest, "tokens": count, "fit": round(fit, 4)}
    config.write_stage_settings(settings, "vision_proj")
    checkpoints.save(Path(snakemake.output[0]), {"weight": weight}, meta)
