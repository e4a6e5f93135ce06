# The exported file, loaded as those would who use it, against the splits that are not trained on.


rule evaluate:
    message:
        "Evaluate {input.exported}"
    input:
        settings=f"{RUN}/settings/evaluate.json",
        exported=settings.exported,
        trained=f"{RUN}/trained.safetensors",
        index=f"{RUN}/shards.json",
        blocks=[block for split in PACK.splits[1:] for block in BLOCKS[split]],
        corpus=[f"{RUN}/corpus/{split}.jsonl" for split in PACK.splits[1:]],
        base=BASE,
    output:
        f"{RUN}/eval.json",
    log:
        f"{RUN}/logs/evaluate.log",
    benchmark:
        f"{RUN}/benchmarks/evaluate.tsv"
    params:
        settings=settings.model_dump(),
    threads: 8
    resources:
        gpu=1,
        mem_mb=16000,
        runtime="2h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/evaluate.py"
