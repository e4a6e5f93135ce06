# Of LoRAs, targets that train to a rung of the ladder and fail if something does not hold there: `snakemake ladder_20`.
# Training goes on from there whenever more is asked for. No outputs: what was judged is judged again, as `snapshot`.
for steps in PACK.rungs:

    rule:
        name:
            f"ladder_{steps}"
        message:
            "Train to step {params.steps} and judge what came of it"
        input:
            settings=f"{RUN}/settings/train.json",
            corpus=f"{RUN}/corpus.json",
            index=f"{RUN}/shards.json",
            blocks=[block for split in PACK.splits for block in BLOCKS[split]],
            materials=f"{RUN}/materials.json",
            base=BASE,
        log:
            f"{RUN}/logs/ladder-{steps}.log",
        params:
            settings=settings.model_dump(),
            configfiles=settings_files,
            overrides=workflow.config_settings.config,
            steps=steps,
        threads: 8
        resources:
            gpu=settings.train.processes,
            mem_mb=24000,
            runtime="24h",
            slurm_extra="--signal=URG@300",  # seconds before its time limit; see scripts/trainer/slurm.py
        conda:
            "../envs/gguf-trainer.yaml"
        script:
            "../scripts/ladder.py"
