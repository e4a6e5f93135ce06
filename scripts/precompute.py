"""Index the shards of a run."""

from trainer import config, shard_index
from trainer.files import read_json, write_json
from trainer.job import job, log

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    train, val = (list(map(read_json, files)) for files in (snakemake.input.train, snakemake.input.val))
    index = shard_index.index(train, val, settings.pack)
    write_json(snakemake.output[0], index)
    for split in ("train", "val"):
        log.info("%s: %d samples, %.2f GB", split, index[split]["samples"], index[split]["bytes"] / 1e9)
