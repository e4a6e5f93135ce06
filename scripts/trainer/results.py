"""What a finished run came to: what its report and its card both tell, and how they write numbers."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from trainer import packs, probe
from trainer.config import Settings
from trainer.files import read_json
from trainer.job import duration
from trainer.packs.base import AdapterPack

MINUS = "\N{MINUS SIGN}"
FIGURES: dict[str, str] = {
    "cos": "validation cosine",
    "cos_centered": "centred validation cosine",
    "cos_slice": "validation cosine",
}
METRICS = {
    "cos": "mean cosine of the adapter's rows to the teacher's, over all val rows",
    "cos_centered": "the same of rows less the mean training row: 0 is a guess that never looks at the prompt",
    "cos_rms": "mean cosine after each row is divided by its root mean square, as engine models do",
    "cos_slice": "mean over val samples of the mean cosine of their rows that the image model reads",
    "cos_edit": "the same of samples with pictures",
    "cos_t2i": "the same of samples without",
    "cos_vis": "mean cosine of rows under pictures",
    "cos_txt": "mean cosine of all other rows",
    "cos_eos": "mean cosine of each prompt's last row, the end marker",
    "worst_row_cos": "the main figure of the worst row",
    "rel_mse": "squared error as a share of the targets' squares: 0 is perfect, 1 is a guess of nothing but zeros",
    "roundtrip_cos": "the main figure between the file's rows and the checkpoint's: what the file format costs",
    "baseline_cos": "the main figure of a guess that gives every row the mean training row",
    "probe_cos": "the main figure on prompts of other kinds, each kind counting the same",
}


@dataclass(frozen=True)
class Result:
    """A finished run: its settings and pack, and the content of eval.json, corpus.json, shards.json, materials.json."""

    settings: Settings
    pack: AdapterPack
    evaluation: dict[str, Any]
    corpus: dict[str, Any]
    shards: dict[str, Any]
    materials: list[dict[str, Any]]

    @property
    def exported(self) -> Path:
        """The exported file."""
        return Path(self.settings.exported)

    @property
    def figure(self) -> str:
        """What the pack's main figure is called."""
        return FIGURES[self.pack.metric]

    @property
    def figures(self) -> dict[str, str]:
        """Names of all that was measured, with what each means."""
        return {name: meaning for name, meaning in METRICS.items() if name in self.evaluation["metrics"]}

    @property
    def probes(self) -> list[dict[str, Any]]:
        """The figure on prompts of other kinds, a row a kind; runs that older versions evaluated have none."""
        return [{"kind": probe.KINDS[kind]} | values for kind, values in self.evaluation.get("probe", {}).items()]

    def command(self, absolute: bool) -> str:
        """The engine's command line with the file, by its path or only its name; "" where no engine reads it."""
        return self.pack.command.replace("{gguf}", _quoted(self.settings.exported, absolute))

    def reference(self, absolute: bool) -> str:
        """What a reference picture adds to it; "" where the companion that it takes is not written."""
        if self.pack.companion and not self.settings.companion:
            return ""
        return self.pack.reference_options.replace("{companion}", _quoted(self.settings.companion or "", absolute))


def _quoted(file: str, absolute: bool) -> str:
    return shlex.quote(str(Path(file).resolve()) if absolute else Path(file).name)


def read(run_folder: Path, settings: Settings) -> Result:
    """Read a finished run.

    Raises:
        TrainerError: a file of it is missing or damaged.
    """
    evaluation, corpus, shards = (read_json(run_folder / f"{name}.json") for name in ("eval", "corpus", "shards"))
    materials = read_json(run_folder / "materials.json")["materials"]
    return Result(settings, packs.get(settings.pack), evaluation, corpus, shards, materials)


def environment(**options: Any) -> jinja2.Environment:
    """Templates beside this file, with the filters below."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    made.filters |= {"cosine": cosine, "count": count, "size": size, "duration": duration, "text_of": text_of}
    return made


def cosine(value: float | None, digits: int = 4) -> str:
    """A metric with fixed digits; a dash where it was not measured."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", MINUS)


def count(value: float | None) -> str:
    """A whole number with thin spaces between thousands; a dash where it was not measured."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def size(value: float | None) -> str:
    """Bytes in decimal units; a dash where they are not known."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def text_of(value: Any) -> str:
    """A value of a record in words: nested ones as `key value, key value`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(inner)}" for key, inner in value.items() if inner not in (None, "", {}))
    return str(value)
