# Trains a pack: materials -> corpus -> precompute -> train -> export -> evaluate -> report.
# Start with `snakemake --profile packs/demo -n`. Every setting is described in config.yaml.
import sys

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.utils import min_version

min_version("9.0")


configfile: f"{workflow.basedir}/config.yaml"


# The package that rules and scripts share; jobs of a rule find it by themselves.
sys.path.insert(0, f"{workflow.basedir}/scripts")

from trainer import (
    commands,
    config as settings_of,
    control,
    materials,
    packs,
    plan,
    publishing,
)
from trainer.errors import TrainerError

settings_files = [
    f"{workflow.basedir}/config.yaml",
    *map(str, workflow.config_settings.configfiles),
]
try:
    config, renamed = settings_of.merged(settings_files, workflow.config_settings.config)
    settings = settings_of.load(config)
    settings_of.write_stage_settings(settings)
except TrainerError as error:
    raise WorkflowError(str(error))

RUN, PACK = settings.folder, packs.get(settings.pack)
if workflow.is_main_process:  # for `scripts/dashboard.py`, and no rule's input
    for words in [*renamed, *settings_of.warnings(settings)]:
        logger.warning(words)
    commands.record(RUN, sys.argv[1:], settings_files, workflow.config_settings.config)
    logger.addFilter(plan.shorten)
    if workflow.output_settings.dryrun:
        logger.addHandler(plan.Plan(RUN))


localrules:
    all,
    card,
    doctor,
    material,
    materials,
    precompute,
    publish,
    report,


onstart:
    control.clear_stop(RUN)


include: "rules/materials.smk"
include: "rules/corpus.smk"
include: "rules/precompute.smk"
include: "rules/train.smk"
include: "rules/export.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/publish.smk"
include: "rules/doctor.smk"
include: "rules/ladder.smk"


rule all:
    default_target: True
    input:
        settings.exports,
        settings.companion or [],
        f"{RUN}/eval.json",
        f"{RUN}/report.html",
        f"{RUN}/README.md",
