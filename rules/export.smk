# The exported file, those that go with it, and step-tagged files of a run as it is now.


rule export:
    message:
        "Export {output[0]}"
    input:
        settings=f"{RUN}/settings/export.json",
        trained=f"{RUN}/trained.safetensors",
        materials=f"{RUN}/materials.json",
    output:
        update(settings.exports),  # not deleted first: it may be another run's
    log:
        f"{RUN}/logs/export.log",
    benchmark:
        f"{RUN}/benchmarks/export.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=4000,
        runtime="30m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/export.py"


if settings.companion:

    rule companion:
        message:
            "Export {output}"
        input:
            settings=f"{RUN}/settings/export.json",
            record=expand(
                f"{RUN}/materials/{{id}}.json", id=materials.ids(settings, role="companion")
            ),
        output:
            update(settings.companion),  # not deleted first: it may be another run's
        log:
            f"{RUN}/logs/companion.log",
        benchmark:
            f"{RUN}/benchmarks/companion.tsv"
        params:
            settings=settings.model_dump(),
        threads: 1
        resources:
            mem_mb=4000,
            runtime="1h",
        conda:
            "../envs/gguf-trainer.yaml"
        script:
            "../scripts/companion.py"


# No inputs: asking for a snapshot never starts or waits for training (run it with --nolock while training runs).
# No benchmark: a rule without outputs runs each time it is asked for, but one with a benchmark only the first time.
rule snapshot:
    message:
        "Export a snapshot of {params.settings[run]} at {params.settings[snapshot][at]}"
    log:
        f"{RUN}/logs/snapshot.log",
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=8000,
        runtime="1h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/snapshot.py"
