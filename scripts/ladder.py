"""Train a LoRA to a rung of the ladder, and judge it; fails if something does not hold."""

import gc

import torch
from trainer import config, train_process
from trainer.job import job
from trainer.lora import verdict

settings, steps = config.load(snakemake.params.settings), snakemake.params.steps
with job(snakemake.log[0]):
    verdict.refuse_unreachable(settings, steps)
train_process.start(
    {
        "settings": snakemake.params.settings,
        "configfiles": snakemake.params.configfiles,
        "overrides": snakemake.params.overrides,
        "log": snakemake.log[0],
        "until": steps,
    },
    snakemake.threads,
)
gc.collect()
torch.cuda.empty_cache()  # for the whole pipeline
with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    verdict.judge(settings, steps)
