"""Find or download one material and record it."""

from dataclasses import asdict

from trainer.config import Settings
from trainer.files import write_json
from trainer.finding import prepare
from trainer.job import job

with job(snakemake.log[0]):
    settings = Settings.model_validate(snakemake.params.settings)
    write_json(snakemake.output[0], asdict(prepare(settings, snakemake.wildcards.id)))
