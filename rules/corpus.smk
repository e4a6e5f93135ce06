# Of adapters, prompts, and pictures with instructions; of LoRAs, pictures with captions: gathered, cleaned,
# de-duplicated and split into train and val; and the prompts of probe, or the captions of both. The pictures
# (corpus/images) are no output, which Snakemake would delete when the job is stopped or done again: each is decoded
# once. What lies in image folders and what the prompts of probe are is told by digests in the settings.


rule corpus:
    message:
        "Build the corpus"
    input:
        settings=f"{RUN}/settings/corpus.json",
        files=[
            *settings.corpus.files,
            *filter(None, [settings.corpus.train_file, settings.corpus.val_file]),
        ],
        presets=expand(
            f"{RUN}/materials/{{id}}.json",
            id=materials.ids(settings, role=("prompts", "images", "pictures")),
        ),
    output:
        **{split: f"{RUN}/corpus/{split}.jsonl" for split in PACK.splits},
        summary=f"{RUN}/corpus.json",
    log:
        f"{RUN}/logs/corpus.log",
    benchmark:
        f"{RUN}/benchmarks/corpus.tsv"
    params:
        settings=settings.model_dump(),
    threads: 8 if settings.corpus.n_image or settings.pictures.folder else 1
    resources:
        mem_mb=16000,
        runtime="4h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/corpus.py"
