# What training reads, as shards: of adapters teacher rows and student states of every prompt, of LoRAs latents of every
# picture and embeddings of every caption. A job is one block of shards: it loads the models once.
# Its output is the list of the block's shards. The shards themselves are no outputs, which Snakemake would delete when
# a job is stopped: a block keeps what is right and goes on.
BLOCKS = {
    split: [f"{RUN}/shards/{split}/{number:04d}.json" for number in range(settings.blocks(split))]
    for split in PACK.splits
}
# Main memory that a block may use.
BLOCK_MB = 24000
MODELS = expand(
    f"{RUN}/materials/{{id}}.json",
    id=materials.ids(settings, role=("teacher", "student", "tokenizer", "base")),
)

# For packs with pictures.
VISION_PROJ = [f"{RUN}/shards/vision_proj.safetensors"] if settings.adapter.vision_dim else []


rule precompute_block:
    message:
        "Compute block {wildcards.block} of the {wildcards.split} shards"
    input:
        settings=f"{RUN}/settings/precompute.json",
        corpus=f"{RUN}/corpus/{{split}}.jsonl",
        materials=MODELS,
        vision_proj=VISION_PROJ,
    output:
        f"{RUN}/shards/{{split}}/{{block}}.json",
    log:
        f"{RUN}/logs/precompute-{{split}}-{{block}}.log",
    benchmark:
        f"{RUN}/benchmarks/precompute-{{split}}-{{block}}.tsv"
    params:
        settings=settings.model_dump(),
        blocks=lambda wildcards: len(BLOCKS[wildcards.split]),
    wildcard_constraints:
        split="|".join(PACK.splits),
        block=r"\d{4}",
    threads: 8
    resources:
        gpu=1,
        mem_mb=BLOCK_MB,
        runtime="8h",
        slurm_extra="--signal=URG@300",  # seconds before its time limit; see scripts/trainer/slurm.py
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/precompute_block.py"


if VISION_PROJ:

    rule vision_proj:
        message:
            "Fit student embeddings to pieces of pictures"
        input:
            settings=f"{RUN}/settings/vision_proj.json",
            materials=MODELS,
        output:
            VISION_PROJ,
        log:
            f"{RUN}/logs/vision_proj.log",
        benchmark:
            f"{RUN}/benchmarks/vision_proj.tsv"
        params:
            settings=settings.model_dump(),
        threads: 8
        resources:
            mem_mb=4000,
            runtime="1h",
        conda:
            "../envs/gguf-trainer.yaml"
        script:
            "../scripts/vision_proj.py"


if settings.adapter.vocabulary:

    rule seed_table:
        message:
            "Compress the teacher's token embeddings to the width of the adapter"
        input:
            settings=f"{RUN}/settings/seed_table.json",
            materials=MODELS,
        output:
            f"{RUN}/shards/seed_table.safetensors",
        log:
            f"{RUN}/logs/seed_table.log",
        benchmark:
            f"{RUN}/benchmarks/seed_table.tsv"
        params:
            settings=settings.model_dump(),
        threads: 8
        resources:
            mem_mb=8000,
            runtime="1h",
        conda:
            "../envs/gguf-trainer.yaml"
        script:
            "../scripts/seed_table.py"


rule precompute:
    message:
        "Index the shards"
    input:
        **BLOCKS,
    output:
        f"{RUN}/shards.json",
    log:
        f"{RUN}/logs/precompute.log",
    benchmark:
        f"{RUN}/benchmarks/precompute.tsv"
    params:
        settings=settings.model_dump(),
    threads: 1
    resources:
        mem_mb=2000,
        runtime="30m",
    conda:
        "../envs/gguf-trainer.yaml"
    script:
        "../scripts/precompute.py"
