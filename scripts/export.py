"""Export the best checkpoint."""

from pathlib import Path

from trainer import config, export, packs
from trainer.files import read_json
from trainer.job import job, log
from trainer.packs.base import LoraPack

with job(snakemake.log[0]):
    out = Path(snakemake.output[0])
    records = read_json(snakemake.input.materials)["materials"]
    settings = config.load(snakemake.params.settings)
    given = settings, records, Path(snakemake.input.trained), out
    if isinstance(packs.get(settings.pack), LoraPack):
        from trainer.lora import export as lora_export

        lora_export.export_best(*given)
    else:
        export.export_best(*given)
    log.info("wrote %s (%.1f MB)", out, out.stat().st_size / 1e6)
