"""Rule corpus: gather, clean, de-duplicate and split the prompts, and the pictures of packs that take some."""

from trainer import config, corpus, materials, packs, picture_corpus
from trainer.job import job
from trainer.packs.base import LoraPack

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    stages = config.stage_settings(settings, "corpus")  # before folders are read: what comes later is seen next time
    pack, summary = packs.get(settings.pack), snakemake.output["summary"]
    paths = {split: snakemake.output[split] for split in pack.splits}
    if isinstance(pack, LoraPack):
        from trainer.lora import corpus as lora_corpus

        options = settings.pictures
        if not options.folder:  # the pack brings some
            (record,) = map(materials.read_record, snakemake.input.presets)
            options = options.model_copy(update={"folder": record.path})
        lora_corpus.build(options, options.resolution, paths | {"summary": summary}, threads=snakemake.threads)
    elif pack.vision_dim:
        picture_corpus.build(settings.corpus, snakemake.input.presets, paths, summary, threads=snakemake.threads)
    else:
        corpus.build(settings.corpus, snakemake.input.presets, paths, summary)
    config.write_stages(settings, stages)
