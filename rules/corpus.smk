# Prompts: gathered, cleaned, de-duplicated and split into train and val.


rule corpus:
    message:
        "Build the corpus"
    input:
        settings=f"{RUN}/settings/corpus.json",
        files=[
            *settings.corpus.files,
            *filter(None, [settings.corpus.train_file, settings.corpus.val_file]),
        ],
        presets=expand(f"{RUN}/materials/{{id}}.json", id=materials.ids(settings, role="prompts")),
    output:
        train=f"{RUN}/corpus/train.jsonl",
        val=f"{RUN}/corpus/val.jsonl",
        summary=f"{RUN}/corpus.json",
    log:
        f"{RUN}/logs/corpus.log",
    benchmark:
        f"{RUN}/benchmarks/corpus.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=16000,
        runtime="4h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/corpus.py"
