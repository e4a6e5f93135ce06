# What this machine lacks for a run with these settings. No inputs, and no benchmark, as `snapshot`.


rule doctor:
    message:
        "Look at this machine for {params.settings[run]}"
    log:
        f"{RUN}/logs/doctor.log",
    params:
        settings=settings.model_dump(),
        block_mb=BLOCK_MB,
    threads: 8
    resources:
        mem_mb=4000,
        runtime="10m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/doctor.py"
