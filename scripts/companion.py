"""Export the file that goes with the adapter."""

from pathlib import Path

from trainer import config, export, materials
from trainer.job import job, log

with job(snakemake.log[0]):
    out = Path(snakemake.output[0])
    (record,) = map(materials.read_record, snakemake.input.record)
    export.export_companion(config.load(snakemake.params.settings), record, out)
    log.info("wrote %s (%.1f MB)", out, out.stat().st_size / 1e6)
