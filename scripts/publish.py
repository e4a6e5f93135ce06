"""Upload the adapter and its card."""

from pathlib import Path

from trainer import config, publishing
from trainer.errors import TrainerError
from trainer.job import job, log

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    if reason := publishing.refusal(settings):
        raise TrainerError(reason)
    log.info("published: %s", publishing.publish(settings, Path(snakemake.input.card)))
