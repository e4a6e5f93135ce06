# One self-contained page a run.


rule report:
    message:
        "Write {output}"
    input:
        materials=f"{RUN}/materials.json",
        corpus=f"{RUN}/corpus.json",
        index=f"{RUN}/shards.json",
        evaluation=f"{RUN}/eval.json",
        exported=settings.exports,
    output:
        f"{RUN}/report.html",
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=2000,
        runtime="10m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/report.py"
