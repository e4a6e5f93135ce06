"""Index the shards of a run."""

from trainer import config, packs, shard_index
from trainer.files import read_json, write_json
from trainer.job import job, log

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    splits = packs.get(settings.pack).splits
    blocks = {split: list(map(read_json, snakemake.input[split])) for split in splits}
    index = shard_index.index(blocks, settings.pack)
    write_json(snakemake.output[0], index)
    for split in splits:
        log.info("%s: %d samples, %.2f GB", split, index[split]["samples"], index[split]["bytes"] / 1e9)
