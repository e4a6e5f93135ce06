"""Rule corpus: gather, clean, de-duplicate and split the prompts, and the pictures of packs that take some."""

from trainer import config, corpus, packs, picture_corpus
from trainer.corpus_files import SPLITS
from trainer.job import job

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    stages = config.stage_settings(settings, "corpus")  # before folders are read: what comes later is seen next time
    inputs = {"settings": settings.corpus, "records": snakemake.input.presets}
    outputs = {name: snakemake.output[name] for name in (*SPLITS, "summary")}
    if packs.get(settings.pack).vision_dim:
        picture_corpus.build(**inputs, **outputs, threads=snakemake.threads)
    else:
        corpus.build(**inputs, **outputs)
    config.write_stages(settings, stages)
