# Models and data sets: found and linked where they are, downloaded where they are not.


rule material:
    message:
        "Find or download {wildcards.id}"
    input:
        settings=f"{RUN}/settings/materials.json",
        recorded=lambda wildcards: materials.recorded_files(settings, wildcards.id),
    output:
        f"{RUN}/materials/{{id}}.json",
    log:
        f"{RUN}/logs/material-{{id}}.log",
    benchmark:
        f"{RUN}/benchmarks/material-{{id}}.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=2000,
        runtime="24h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/material.py"


# The base model of LoRAs.
BASE = expand(f"{RUN}/materials/{{id}}.json", id=materials.ids(settings, role="base"))


rule materials:
    message:
        "Record what this run is made from"
    input:
        records=expand(f"{RUN}/materials/{{id}}.json", id=materials.ids(settings)),
    output:
        f"{RUN}/materials.json",
    log:
        f"{RUN}/logs/materials.log",
    benchmark:
        f"{RUN}/benchmarks/materials.tsv"
    threads: 1
    resources:
        mem_mb=500,
        runtime="10m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/materials.py"
