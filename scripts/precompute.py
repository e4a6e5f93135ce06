"""Index the shards of a run."""

from pathlib import Path

from trainer import config, materials, precompute
from trainer.files import write_json
from trainer.job import job, log

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    records = {record.id: record for record in map(materials.read_record, snakemake.input.materials)}
    train, val = ([Path(file) for file in files] for files in (snakemake.input.train, snakemake.input.val))
    index = precompute.index(train, val, settings, records)
    write_json(snakemake.output[0], index)
    for split in ("train", "val"):
        log.info("%s: %d samples, %.2f GB", split, index[split]["samples"], index[split]["bytes"] / 1e9)
