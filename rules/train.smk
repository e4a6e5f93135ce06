# The adapter or the LoRA. One job, which resumes from its own state and follows `train.steps` while it runs. The state, the best
# and kept checkpoints and the metrics are no outputs: Snakemake would delete them, or put back older ones, when the job
# is stopped. The output is the best checkpoint of the training that has come to its end.


rule train:
    message:
        "Train to step {params.settings[train][steps]}"
    input:
        settings=f"{RUN}/settings/train.json",
        plan=f"{RUN}/settings/plan.json",
        index=f"{RUN}/shards.json",
        blocks=[block for split in PACK.trained_on for block in BLOCKS[split]],
        base=BASE,
        seed_table=[f"{RUN}/shards/seed_table.safetensors"] if settings.adapter.vocabulary else [],
        vision_proj=[f"{RUN}/shards/vision_proj.safetensors"] if settings.adapter.vision_dim else [],
    output:
        f"{RUN}/trained.safetensors",
    log:
        f"{RUN}/logs/train.log",
    benchmark:
        f"{RUN}/benchmarks/train.tsv"
    params:
        settings=settings.model_dump(),
        configfiles=settings_files,
        overrides=workflow.config_settings.config,
    threads: 8
    resources:
        gpu=settings.train.processes,
        mem_mb=24000,
        runtime="24h",
        slurm_extra="--signal=URG@300",  # seconds before its time limit; see scripts/trainer/slurm.py
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/train.py"
