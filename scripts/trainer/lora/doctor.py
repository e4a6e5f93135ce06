"""What is wrong with a LoRA, by the files of its run: the ten questions to ask first, and known patterns of failure.

Nothing is computed but what is in the LoRA's file, and nothing is changed.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer import checkpoints
from trainer.errors import TrainerError
from trainer.files import read_json
from trainer.lora import families, files, ladder

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Answer:
    """To one of the ten questions: yes is well."""

    question: str
    verdict: Verdict
    words: str


@dataclass(frozen=True)
class Finding:
    """A pattern of failure that a run shows; `fault`: it is one, and no mere look of one."""

    pattern: str
    words: str
    fault: bool = True


@dataclass
class Evidence:
    """What a run left.

    rows: of the ladder, by rung and name. metrics: rows of metrics.csv. kept: checkpoints, with why one is unreadable.
    stopped: step at which training met a value that is not finite, and what it said.
    lora: its file; contents, values: of it; problem: why there are none. evaluation: the content of eval.json.
    """

    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    metrics: list[dict[str, str]] = field(default_factory=list)
    kept: dict[Path, str | None] = field(default_factory=dict)
    stopped: tuple[int, str] | None = None
    lora: Path | None = None
    contents: files.Contents | None = None
    values: dict[str, str] = field(default_factory=dict)
    problem: str = "no LoRA file of this run was found"
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, column: str) -> list[float]:
        """What was measured of a column, by step."""
        return [float(row[column]) for row in self.metrics if row.get(column)]


def read(run: Path, lora: Path | None = None) -> Evidence:
    """What a run left, and its LoRA file: that one, or the one beside the run's folder that says it is the run's.

    Raises:
        TrainerError: there is no such run, or a JSON file of it is damaged.
    """
    if not run.is_dir():
        raise TrainerError(f"{run} is no folder of a run: give one, such as runs/my-lora")
    found = Evidence()
    if (run / "eval.json").exists():
        found.evaluation = read_json(run / "eval.json")
    # A run may have been judged rung by rung before that, or since.
    for path in sorted(filter(Path.exists, (run / "eval.json", run / "ladder.json")), key=_time):
        rungs = (found.evaluation.get("ladder", {}) if path.name == "eval.json" else read_json(path)).get("rungs", [])
        found.rows |= {(rung["name"], row["name"]): row for rung in rungs for row in rung["rows"]}
    if (run / "metrics.csv").exists():
        with open(run / "metrics.csv", encoding="utf-8", newline="") as table:
            found.metrics = list(csv.DictReader(table))
    found.stopped = _stopped([*run.glob("logs/train.log"), *run.glob("logs/ladder-*.log")], found.metrics)
    for path in sorted((run / "checkpoints").glob("*.safetensors")):
        try:
            found.kept[path] = None if files.header(path)[0] else f"{path.name} holds no tensor"
            checkpoints.read_meta(path)
        except TrainerError as error:
            found.kept[path] = str(error)
    found.lora = lora or next(_own(run), None)
    if path := found.lora:
        try:
            found.values = files.header(path)[1]
            family = found.values.get(files.OURS + "family")
            if family not in families.names():
                raise TrainerError(f"{path} does not say of which family it is: export it again")
            found.contents = files.contents(path, families.get(family))
        except TrainerError as error:
            found.problem = str(error)
    return found


def _time(path: Path) -> float:
    return path.stat().st_mtime


def _stopped(logs: list[Path], metrics: list[dict[str, str]]) -> tuple[int, str] | None:
    """What logs say, the newest last, of a value that is not finite, unless training has gone on since."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(logs, key=_time)]
    said = re.findall(r".*not finite in step \d+.*", "\n".join(texts))
    if not said:
        return None
    step = int(said[-1].partition("not finite in step ")[2].split()[0])
    return None if metrics and int(metrics[-1]["step"]) >= step else (step, said[-1].strip())


def _own(run: Path) -> Iterator[Path]:
    """LoRA files whose sidecar, which is small and seldom damaged, says that they are a run's."""
    for path in sorted(run.parent.glob("*.safetensors")):
        beside = files.sidecar(path)
        if beside.exists() and read_json(beside).get("run") == run.name:
            yield path


# --- the ten questions ----------------------------------------------------------------------------------------------


def answers(found: Evidence) -> list[Answer]:
    """To the ten questions, in the order to ask them."""
    return [Answer(question, *answer(found)) for question, answer in _QUESTIONS.items()]


def _row(found: Evidence, rung: str, name: str, without: str) -> tuple[Verdict, str]:
    """What a row of the ladder says; `without`: what would make one."""
    row = found.rows.get((rung, name))
    if row is None:
        return "unknown", without
    value = "no number" if row["value"] is None else row["value"]
    return ("yes" if row["passed"] else "no"), f"{name} {value}, to be {row['limit']}: {row['words']}"


def _first_loss(found: Evidence) -> tuple[Verdict, str]:
    losses = found.numbers("loss")
    if found.stopped and (found.stopped[0] == 1 or not losses):
        return "no", found.stopped[1]
    if not losses:
        return "unknown", "metrics.csv has no loss yet: train a step"
    bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        return "no", f"the loss of step {found.metrics[bad[0]]['step']} is {losses[bad[0]]}"
    return "yes", f"{losses[0]:.4g} at first, {losses[-1]:.4g} at last, all {len(losses)} finite"


def _written(found: Evidence) -> tuple[Verdict, str]:
    if not found.kept:
        return "no", "the folder checkpoints has none"
    return "yes", ", ".join(path.name for path in found.kept)


def _nonempty(found: Evidence) -> tuple[Verdict, str]:
    broken = [problem for problem in found.kept.values() if problem]
    if broken:
        return "no", broken[0]
    if found.contents is None:
        return ("no" if found.lora else "unknown"), found.problem
    held = found.contents
    size = f"{held.tensors} tensors of {len(held.modules)} modules, {held.bytes} bytes"
    if not held.whole:
        return "no", f"{size}, of which {held.header + held.payload} are said to be there"
    return "yes", f"{size}: the header and all values"


def _nonzero(found: Evidence) -> tuple[Verdict, str]:
    if found.contents is None:
        return "unknown", found.problem
    live, wanted = len(found.contents.live), _can_learn(found)
    words = f"{live} of {wanted} that can learn, of {len(found.contents.modules)} modules"
    return ("yes" if live == wanted and found.contents.finite else "no"), words + (
        "" if found.contents.finite else "; some values are not finite"
    )


def _can_learn(found: Evidence) -> int:
    return len(found.contents.modules) - int(found.values.get(files.OURS + "dead", 0)) if found.contents else 0


def _scaler(found: Evidence) -> tuple[Verdict, str]:
    if found.rows and ("20", "loss scale") not in found.rows:
        return "yes", "none is used: numbers have the range of f32"
    return _row(found, "20", "loss scale", "no rung of 20 steps: evaluate the run")


def _chosen(found: Evidence) -> tuple[Verdict, str]:
    trained, drawn = found.values.get(files.OURS + "attention"), found.evaluation.get("attention")
    if not trained or not drawn:
        return "unknown", f"training by {trained or '?'}, pictures by {drawn or '?'}: export and evaluate the run"
    return ("yes" if trained == drawn else "no"), f"training by {trained}, pictures by {drawn}"


def _reached(found: Evidence) -> tuple[Verdict, str]:
    if ("1", "lora_B gradients") in found.rows or found.contents is None:
        return _row(found, "1", "lora_B gradients", found.problem)
    live, wanted = len(found.contents.live), _can_learn(found)
    words = f"lora_B of {live} of {wanted} modules that can learn left 0, which only a gradient makes it do"
    return "yes" if live == wanted else "no", words


def _ladder(rung: str, name: str) -> Callable[[Evidence], tuple[Verdict, str]]:
    return lambda found: _row(found, rung, name, f"no rung with {name}: evaluate the run")


_QUESTIONS: dict[str, Callable[[Evidence], tuple[Verdict, str]]] = {
    "Is the loss finite from the first step?": _first_loss,
    "Is a checkpoint written?": _written,
    "Is it more than a header?": _nonempty,
    "Are the lora_B (lora_up) other than 0?": _nonzero,
    "Are fixed conditions constants?": _ladder("conditions", "variable conditions"),
    "Do tokenizer, template and encoder give in pictures what they gave in training?": _ladder("conditions", "encoded"),
    "Are VAE and encoders the same files in training and for pictures?": _ladder("conditions", "base"),
    # torch reduces broadcast rotary embeddings itself, so what is left to see is whether gradients get through.
    "Do gradients reach every module, through rotary embeddings too?": _reached,
    "Is the loss scale, if there is one, 1 or more?": _scaler,
    "Is the attention that of training for pictures too?": _chosen,
}


# --- patterns of failure --------------------------------------------------------------------------------------------


def findings(found: Evidence) -> list[Finding]:
    """The known patterns of failure that a run shows."""
    return [it for look in (_not_finite, _zero, _collapsing, _low_band, _ignored) for it in look(found)]


def _not_finite(found: Evidence) -> Iterator[Finding]:
    bad = [int(row["step"]) for row in found.metrics if row.get("loss") and not math.isfinite(float(row["loss"]))]
    bad += [found.stopped[0]] if found.stopped else []
    if not bad:
        return
    if min(bad) == 1:
        words = (
            "look at the numbers of the base (Qwen-Image and Z-Image overflow f16), at tokenizer and conditions "
            "(questions 5 to 7), and at the pictures that training named"
        )
        yield Finding("not finite at the first step", words)
    else:
        yield Finding("not finite later", f"in step {min(bad)}: lower train.lr, and see the pictures it names")


def _zero(found: Evidence) -> Iterator[Finding]:
    if found.contents is None:
        return
    live, wanted = len(found.contents.live), _can_learn(found)
    if live < wanted:
        zero = sorted(set(found.contents.modules) - set(found.contents.live))
        words = f"{wanted - live} of {wanted} modules that can learn have not, such as {zero[0]}"
        most = ": gradients are cut before most of them" if live < wanted / 2 else ""
        yield Finding("lora_B stays 0", words + most)


def _collapsing(found: Evidence) -> Iterator[Finding]:
    rows = [found.rows.get(("20", name)) for name in ("loss scale", "halvings of the loss scale")]
    if any(row and not row["passed"] for row in rows):
        yield Finding("the loss scale collapses", "values overflow: use bf16; a smaller scale only hides it")


def _low_band(found: Evidence) -> Iterator[Finding]:
    bands = {band: found.numbers(f"val_loss_{band}") for band in ladder.BANDS}
    if not all(bands.values()):
        return
    low, *others = bands.values()
    if low[-1] > max(it[-1] for it in others) and low[-1] <= 1.05 * low[0]:
        words = "is higher than others, as a target of noise makes it: compare each band with its start"
        yield Finding("loss at little noise", words, fault=False)
    for band, values in bands.items():
        if values[-1] > 1.05 * values[0]:
            yield Finding("a band rises", f"val_loss_{band} from {values[0]:.4g} to {values[-1]:.4g}: it forgets there")


def _ignored(found: Evidence) -> Iterator[Finding]:
    row = found.rows.get(("compare", "shift"))
    drawn, trained = found.evaluation.get("family"), found.values.get(files.OURS + "family")
    if drawn and trained and drawn != trained:
        yield Finding("pictures ignore the LoRA", f"it is one of {trained}, and pictures are of {drawn}")
    elif row and not row["passed"]:
        shift = "no number" if row["value"] is None else f"{255 * row['value']:.2g} of 255"
        yield Finding(
            "pictures ignore the LoRA",
            f"they change by {shift}: train longer or at a higher train.lr, if questions 4 and 7 are answered yes",
        )


def text(found: Evidence) -> str:
    """Answers and findings for people."""
    lines = [
        f"{number:2} {answer.verdict:7} {answer.question}\n           {answer.words}"
        for number, answer in enumerate(answers(found), 1)
    ]
    seen = [f"{'fault' if it.fault else 'note'}: {it.pattern}: {it.words}" for it in findings(found)]
    return "\n".join([*lines, "", *(seen or ["no known pattern of failure"])])
