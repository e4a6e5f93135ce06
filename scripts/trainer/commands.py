"""The command that a run was started with, in `settings/command.json`: what starts it again, and whose files set it.

Only commands whose every option is known here are recorded, so that nothing secret ever is.
"""

import argparse
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainer import config
from trainer.errors import TrainerError
from trainer.files import read_json, write_if_changed, write_text

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Command:
    """A command line of Snakemake.

    Attributes:
        folder: where it was given.
        arguments: what stood after `snakemake`.
        configfiles: files of settings, absolute; later ones win.
        steps_given: whether `--config` sets `train.steps`, which wins over all files.
    """

    folder: str
    arguments: list[str]
    configfiles: list[str]
    steps_given: bool

    def process(self, *more: str) -> list[str]:
        """The words to run, with the Python of this process."""
        return [sys.executable, "-m", "snakemake", *self.arguments, *more]

    def text(self) -> str:
        """The command as one would type it."""
        return shlex.join(["snakemake", *self.arguments])


class _Known(argparse.ArgumentParser):
    """The options of Snakemake that a recorded command may have; anything else is a ValueError."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("targets", nargs="*")
        for names in (
            *(("--profile",), ("--workflow-profile",), ("--executor", "-e"), ("--snakefile", "-s")),
            *(("--cores", "-c"), ("--jobs", "-j"), ("--software-deployment-method", "--sdm")),
        ):
            self.add_argument(*names, action="append", nargs="?")
        for names in (
            *(("--configfile", "--configfiles"), ("--config", "-C"), ("--resources", "--res")),
            *(("--default-resources", "--default-res"), ("--set-resources",)),
        ):
            self.add_argument(*names, action="append", nargs="+")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def record(run: Path | str, arguments: list[str], configfiles: list[str], overrides: dict[str, Any]) -> None:
    """Record the command of this process, if it asks for a whole run and has only known options."""
    try:
        targets = _Known().parse_args(arguments).targets
    except ValueError:
        return
    if not targets and "SNAKEMAKE_PROFILE" not in os.environ:
        steps_given = "steps" in (overrides.get("train") or {})
        files = [str(Path(file).absolute()) for file in configfiles]
        write_if_changed(_file(run), asdict(Command(str(Path.cwd()), arguments, files, steps_given)))


def read(run: Path | str) -> Command:
    """The recorded command of a run.

    Raises:
        TrainerError: there is none, or another user wrote it, whose commands are not to be run.
    """
    file = _file(run)
    if not file.exists():
        raise TrainerError(f"no command is recorded for {Path(run).name}: start it once from a terminal")
    if file.stat().st_uid != os.getuid():
        raise TrainerError(f"{file} was written by another user: start the run from a terminal")
    try:
        return Command(**read_json(file))
    except TypeError:
        raise TrainerError(f"{file} is of another version: start the run once from a terminal") from None


def _file(run: Path | str) -> Path:
    return Path(run) / "settings" / "command.json"


def set_steps(command: Command, steps: int) -> Path:
    """Set `train.steps` in the user's settings file that wins; all else in it stays as it is. Gives the file.

    Raises:
        TrainerError: the number is not allowed, or no file of the user's own sets it.
    """
    config.load({"train": {"steps": steps}})
    if command.steps_given:
        raise TrainerError("train.steps is given with --config, which wins over files: change it in that command")
    files = [Path(file) for file in command.configfiles]
    having = [index for index, file in enumerate(files) if "steps" in (_settings(file).get("train") or {})]
    # The last file that has it wins; without it, the user's next one will.
    file = next((file for file in files[having[-1] if having else 0 :] if not _of_the_project(file)), None)
    if not file:
        raise TrainerError(
            "train.steps of this run comes from its pack, which stays as it is: set it in a settings file of your own"
        )
    write_text(file.resolve(), _with_steps(file, steps))
    return file


def _of_the_project(file: Path) -> bool:
    return file.resolve() == CHECKOUT / "config.yaml" or CHECKOUT / "packs" in file.resolve().parents


def _settings(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainerError(f"{file} cannot be read ({error}): nothing was changed") from None
    return value if isinstance(value, dict) else {}


def _with_steps(file: Path, steps: int) -> str:
    """The text of a settings file with other steps, and nothing else changed."""
    before, text = _settings(file), file.read_bytes().decode()
    train = _value(yaml.compose(text), "train")
    if node := _value(train, "steps"):
        new = f"{text[: node.start_mark.index]}{steps}{text[node.end_mark.index :]}"
    elif isinstance(train, yaml.MappingNode) and train.value:
        start = train.value[0][0].start_mark
        separator = ", " if train.flow_style else "\n" + " " * start.column
        new = f"{text[: start.index]}steps: {steps}{separator}{text[start.index :]}"
    else:
        new = text if train else f"{text.rstrip()}\ntrain:\n  steps: {steps}\n"
    try:
        changed = yaml.safe_load(new)
    except yaml.YAMLError:
        changed = None
    if changed != before | {"train": (before.get("train") or {}) | {"steps": steps}}:
        raise TrainerError(f"train.steps could not be changed in {file} without touching more: set it there by hand")
    return new


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a key in a mapping of a YAML document."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
