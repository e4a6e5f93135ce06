"""Gather the records of all materials of a run."""

from dataclasses import asdict

from trainer.files import write_json
from trainer.job import job
from trainer.materials import read_record

with job(snakemake.log[0]):
    records = [asdict(read_record(path)) for path in snakemake.input.records]
    write_json(snakemake.output[0], {"materials": records})
