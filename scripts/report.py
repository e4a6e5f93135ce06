"""Write the report of a run."""

from pathlib import Path

from trainer import config
from trainer.job import job
from trainer.report import write_report

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    write_report(Path(settings.folder), settings, Path(snakemake.output[0]))
