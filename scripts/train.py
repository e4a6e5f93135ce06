"""Train the adapter."""

from pathlib import Path

import torch
from trainer import config, training
from trainer.control import Requests, only_one
from trainer.job import job
from trainer.slurm import put_back

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    torch.set_num_threads(snakemake.threads)
    run = Path(settings.folder)
    requests = Requests(run)  # before the lock: whoever sees the lock can ask
    with put_back(requests), only_one(run, "train"):
        inputs = training.Inputs.read(settings)

        def plan(steps: int) -> int:
            """The planned steps as the user's files say now."""
            return config.read_steps(snakemake.params.configfiles, snakemake.params.overrides, steps)

        training.train(settings, inputs, plan, requests, Path(snakemake.output[0]))
