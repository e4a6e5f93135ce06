"""Train the adapter."""

import torch
from trainer import config, processes, train_process
from trainer.job import job

settings = config.load(snakemake.params.settings)
assignment = {
    "settings": settings.model_dump(),
    "configfiles": snakemake.params.configfiles,
    "overrides": snakemake.params.overrides,
    "log": snakemake.log[0],
    "output": snakemake.output[0],
}
if settings.train.processes == 1:
    torch.set_num_threads(snakemake.threads)
    train_process.run(assignment)
else:
    with job(snakemake.log[0]):
        processes.check(settings.train)
        processes.launch(settings.train.processes, assignment, snakemake.threads)
