# The exported file, loaded as the engine would, against the val and probe shards.


rule evaluate:
    message:
        "Evaluate {input.gguf}"
    input:
        settings=f"{RUN}/settings/evaluate.json",
        gguf=settings.gguf,
        trained=f"{RUN}/trained.safetensors",
        index=f"{RUN}/shards.json",
        blocks=BLOCKS["val"] + BLOCKS["probe"],
        corpus=[f"{RUN}/corpus/val.jsonl", f"{RUN}/corpus/probe.jsonl"],
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
