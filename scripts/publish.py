"""Upload the adapter and its card."""

from pathlib import Path

from trainer import config, publishing
from trainer.job import job, log

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    log.info("published: %s", publishing.publish(settings, Path(settings.folder) / "README.md"))
