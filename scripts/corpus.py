"""Rule corpus: gather, clean, de-duplicate and split the prompts."""

from trainer import config, corpus
from trainer.job import job

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    corpus.build(
        settings.corpus,
        records=snakemake.input.presets,
        train=snakemake.output.train,
        val=snakemake.output.val,
        summary=snakemake.output.summary,
    )
    config.write_stage_settings(settings, "corpus")
