"""Say what this machine lacks for a run."""

import torch
from trainer import config, doctor
from trainer.job import job

with job(snakemake.log[0]):
    torch.set_num_threads(snakemake.threads)
    settings = config.load(snakemake.params.settings)
    doctor.tell(doctor.checks(settings, snakemake.params.block_mb * 10**6))
