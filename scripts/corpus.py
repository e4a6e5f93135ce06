"""Rule corpus: gather, clean, de-duplicate and split the prompts."""

from trainer import corpus
from trainer.config import Settings
from trainer.job import job

with job(snakemake.log[0]):
    settings = Settings.model_validate(snakemake.params.settings)
    corpus.build(
        settings.corpus,
        records=snakemake.input.presets,
        train=snakemake.output.train,
        val=snakemake.output.val,
        summary=snakemake.output.summary,
    )
