"""Export a run as it is now."""

from pathlib import Path

from trainer import config, corpus_files, snapshots
from trainer.files import read_json
from trainer.job import job
from trainer.report import write_report

with job(snakemake.log[0]):
    settings = config.load(snakemake.params.settings)
    run = Path(settings.folder)
    samples = {sample.id: sample for sample in corpus_files.read(run / "corpus" / "val.jsonl")}
    snapshots.take(settings, read_json(run / "materials.json")["materials"], samples)
    if (run / "report.html").exists():
        write_report(run, settings, run / "report.html")
