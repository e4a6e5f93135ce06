# The adapter. One job, which resumes from its own state and follows `train.steps` while it runs.


rule train:
    message:
        "Train the adapter to step {params.settings[train][steps]}"
    input:
        settings=f"{RUN}/settings/train.json",
        plan=f"{RUN}/settings/plan.json",
        index=f"{RUN}/shards.json",
        train=SHARDS["train"],
        val=SHARDS["val"],
        seed_table=f"{RUN}/shards/seed_table.safetensors",
    output:
        state=update(f"{RUN}/checkpoints/state.safetensors"),
        best=update(f"{RUN}/checkpoints/best.safetensors"),
        metrics=update(f"{RUN}/metrics.csv"),
    log:
        f"{RUN}/logs/train.log",
    benchmark:
        f"{RUN}/benchmarks/train.tsv"
    params:
        settings=settings.model_dump(),
        configfiles=[
            f"{workflow.basedir}/config.yaml",
            *map(str, workflow.config_settings.configfiles),
        ],
        overrides=workflow.config_settings.config,
    threads: 8
    resources:
        gpu=1,
        mem_mb=24000,
        runtime="24h",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/train.py"
