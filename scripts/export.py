"""Export the best checkpoint as GGUF."""

from pathlib import Path

from trainer import config, export
from trainer.files import read_json
from trainer.job import job, log

with job(snakemake.log[0]):
    out = Path(snakemake.output[0])
    records = read_json(snakemake.input.materials)["materials"]
    export.export_best(config.load(snakemake.params.settings), records, Path(snakemake.input.trained), out)
    log.info("wrote %s (%.1f MB)", out, out.stat().st_size / 1e6)
