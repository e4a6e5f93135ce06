"""Train the adapter or the LoRA."""

from trainer import train_process

train_process.start(
    {
        "settings": snakemake.params.settings,
        "configfiles": snakemake.params.configfiles,
        "overrides": snakemake.params.overrides,
        "log": snakemake.log[0],
        "output": snakemake.output[0],
    },
    snakemake.threads,
)
