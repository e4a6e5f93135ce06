"""Write the card of the adapter."""

from pathlib import Path

from trainer import config
from trainer.card import write_card
from trainer.job import job

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    write_card(Path(settings.folder), settings, Path(snakemake.output[0]))
