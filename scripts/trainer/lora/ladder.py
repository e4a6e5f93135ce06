"""The ladder: what has to hold after 1, 20, 100 and 500 steps, and of the pictures, each as a number and its limit.

Everything here is arithmetic on what was measured. `val` is the mean over validation items and `BANDS` of the squared
error at fixed noise, on the means of the latents, unweighted; it is compared with the same before the first step.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trainer.errors import TrainerError
from trainer.lora.families import RUNGS
from trainer.lora.files import Contents
from trainer.lora.objective import BANDS

_FEW = 10  # pictures, up to which a LoRA has to learn them well

SHIFT = 2 / 255  # least mean change of a picture
_FLOORS = 10  # and as a multiple of the noise floor
_COLLAPSED = 120 / 255
_FLOOR = {"cpu": 0.0, "cuda": 0.5 / 255}
RELOAD = {"f32": 1e-5, "f16": 1e-3, "bf16": 4e-3}  # largest difference of a pixel, 0..1
_BLANK = 0.25  # of the base's standard deviation


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    value: measured; None where it is no finite number. limit: what it has to be, in words.
    warning: it may fail without failing the rung.
    """

    name: str
    passed: bool
    value: float | int | bool | str | None
    limit: str
    words: str
    warning: bool = False


@dataclass(frozen=True)
class Rung:
    """What was looked at after some steps (`1`, `20`, ...), or of something else (`inert`, `compare`, ...)."""

    name: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether all rows did that are no mere warnings."""
        return all(row.passed or row.warning for row in self.rows)


@dataclass(frozen=True)
class Course:
    """How training went up to a step.

    losses, norms: of each step from the first, the norms before clipping.
    start, now: val by band, before the first step and at this one; [5].
    scales: of the losses, where a gradient scaler is used (f16).
    """

    losses: Sequence[float]
    norms: Sequence[float]
    start: Sequence[float]
    now: Sequence[float]
    scales: Sequence[float] = ()

    @property
    def ratio(self) -> float:
        """Val as a share of what it was before the first step."""
        return _share(fmean(self.now), fmean(self.start))

    @property
    def bands(self) -> list[float]:
        """The same of each band."""
        return [_share(now, start) for now, start in zip(self.now, self.start, strict=True)]


@dataclass(frozen=True)
class Gradients:
    """Of the first step, before it: how many `lora_A` have no gradient but 0, `lora_B` one other, base weights any."""

    a_zero: int
    b_nonzero: int
    base: int


@dataclass(frozen=True)
class Expected:
    """Of the family's network: modules that get a LoRA, how many of them can learn, bytes of all their values."""

    modules: int
    live: int
    payload: int


def course(metrics: Path, step: int, start: Sequence[float]) -> Course:
    """The course of a run up to a step, by its metrics.csv; `start` is val by band without the LoRA.

    Raises:
        TrainerError: the file is missing, or nothing was validated up to there.
    """
    losses, norms, now = [], [], None
    try:
        with open(metrics, encoding="utf-8", newline="") as table:
            for row in csv.DictReader(table):
                if int(row["step"]) > step:
                    break
                losses += [float(row["loss"])] if row["loss"] else []
                norms += [float(row["grad_norm"])] if row["grad_norm"] else []
                bands = [row[f"val_loss_{band}"] for band in BANDS]
                now = [float(value) for value in bands] if all(bands) else now
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(f"{metrics} cannot be read ({error}): run training") from None
    if now is None:
        raise TrainerError(f"nothing was validated up to step {step} ({metrics}): lower train.val_every")
    return Course(losses, norms, start, now)


def _share(value: float, whole: float) -> float:
    return value / whole if whole else math.inf


def _at_most(name: str, value: float, limit: float, words: str, **more: Any) -> Row:
    return Row(name, value <= limit, _finite(value), f"<= {limit:g}", words, **more)


def _at_least(name: str, value: float, limit: float, words: str, **more: Any) -> Row:
    return Row(name, value >= limit, _finite(value), f">= {limit:g}", words, **more)


def _equal(name: str, value: float | str, limit: float | str, words: str, **more: Any) -> Row:
    return Row(name, value == limit, _finite(value), f"= {limit}", words, **more)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _all_finite(course: Course) -> list[Row]:
    found = []
    for name, values in (("loss", course.losses), ("gradient norm", course.norms)):
        bad = [step for step, value in enumerate(values, 1) if not math.isfinite(value)]
        words = f"of step {bad[0]} it is {values[bad[0] - 1]}" if bad else f"of all {len(values)} steps"
        found.append(Row(f"{name} finite", not bad and bool(values), not bad, "finite", words))
    return found


# --- steps ----------------------------------------------------------------------------------------------------------


def inert(untrained: float, weight_0: float, disabled: float, unloaded: float) -> Rung:
    """A LoRA that does nothing does nothing: largest differences from the base's picture, of any pixel."""
    measured = {"untrained": untrained, "at weight 0": weight_0, "disabled": disabled, "unloaded": unloaded}
    return Rung(
        "inert", tuple(_equal(name, value, 0, "bit by bit the base's picture") for name, value in measured.items())
    )


def first(course: Course, gradients: Gradients, contents: Contents, expected: Expected) -> Rung:
    """After 1 step: that it can learn at all, and that the file of it is one."""
    norm = course.norms[0] if course.norms else math.nan
    rows = [
        *_all_finite(course),
        Row("gradient norm", norm > 0, _finite(norm), "> 0", "something is learnt from"),
        _equal("modules", len(contents.modules), expected.modules, "the family's targets have a LoRA each"),
        _equal("lora_A gradients", gradients.a_zero, expected.modules, "all 0, as lora_B is"),
        _equal("lora_B gradients", gradients.b_nonzero, expected.live, "of every module that can learn"),
        _equal("base gradients", gradients.base, 0, "the base is frozen"),
        *_file(contents, expected),
        Row(
            "val",
            0.90 <= course.ratio <= 1.01,
            _finite(course.ratio),
            "0.90 to 1.01",
            "one step changes little of it",
        ),
    ]
    return Rung("1", tuple(rows))


def _file(contents: Contents, expected: Expected) -> list[Row]:
    size = contents.header + contents.payload
    return [
        _equal("tensors", contents.tensors, 2 * len(contents.modules), "lora_A and lora_B of each module"),
        _equal("bytes", contents.bytes, size, "the header and all values of the shapes it names"),
        _at_least("values", contents.payload / expected.payload, 0.99, "of the bytes that rank x (in + out) gives"),
        *_weights(contents, expected),
    ]


def _weights(contents: Contents, expected: Expected) -> list[Row]:
    return [
        _equal("live lora_B", len(contents.live), expected.live, "every module that can learn has learnt"),
        Row("values finite", contents.finite, contents.finite, "finite", "of the file"),
    ]


def twentieth(course: Course) -> Rung:
    """After 20 steps: that it is steady."""
    # Of 10: losses of single steps are up to 200 times apart where min-SNR weighs their levels of noise.
    early, late = median(course.losses[:10]), median(course.losses[-10:])
    halvings = sum(now < before for before, now in zip(course.scales, course.scales[1:], strict=False))
    rows = [
        *_all_finite(course),
        _at_most("loss", _share(late, early), 1.5, "median of the last 10 by that of the first 10"),
        _at_most("largest gradient norm", _share(max(course.norms), median(course.norms)), 10, "by their median"),
        _at_most("val", course.ratio, 1.00, "by that before training"),
        _worst(course),
    ]
    if course.scales:
        rows.append(_at_least("loss scale", min(course.scales), 1, "smaller ones hide an overflow"))
        rows.append(_at_most("halvings of the loss scale", halvings, 2, "more mean that values overflow"))
    return Rung("20", tuple(rows))


def _worst(course: Course) -> Row:
    worst = max(course.bands, key=lambda value: math.inf if math.isnan(value) else value)
    return _at_most("worst band", worst, 1.05, "val of a band by that before training")


def hundredth(course: Course, pictures: int) -> Rung:
    """After 100 steps: that it learns; `pictures` are those it is trained on."""
    rows = [
        *_all_finite(course),
        _at_most("val", course.ratio, 0.99 if pictures <= _FEW else 1.00, "by that before training"),
        _at_least("bands below their start", sum(value < 1 for value in course.bands), 4, f"of {len(BANDS)}"),
        _worst(course),
    ]
    return Rung("100", tuple(rows))


def five_hundredth(
    course: Course,
    pictures: int,
    contents: Contents,
    expected: Expected,
    norm_before: float,
    best: tuple[int, float] | None = None,
) -> Rung:
    """After 500 steps: that it has learnt.

    Args:
        course: up to here.
        pictures: that it is trained on.
        contents: of its file.
        expected: of the family.
        norm_before: norm of all products `lora_B` @ `lora_A` after 100 steps.
        best: step of the best val and that val, where pictures were held out.
    """
    low, _, *upper = course.bands
    rows = [
        *_all_finite(course),
        _at_most("val", course.ratio, 0.97 if pictures <= _FEW else 0.99, "by that before training"),
        Row(
            "bands .5, .7 and .9",
            all(value < 1 for value in upper),
            _finite(max(upper)),
            "< 1",
            "the worst of them by its start",
        ),
        _at_most("band .1", low, 1.05, "by its start; that it is higher than others is in the nature of the target"),
        *_weights(contents, expected),
        Row(
            "norm of the LoRA",
            math.isfinite(contents.norm) and contents.norm > norm_before,
            _finite(contents.norm),
            f"> {norm_before:g}",
            "larger than after 100 steps",
        ),
    ]
    if best is not None:
        step, value = best
        words = f"by the best, of step {step}; more is overfitting: take the best"
        rows.append(_at_most("val of held-out pictures", _share(fmean(course.now), value), 1.02, words, warning=True))
    return Rung("500", tuple(rows))


def weights(contents: Contents, expected: Expected) -> Rung:
    """Of any file: that it is whole, of the size that its rank gives, and that every module that can learn has."""
    modules = _equal("modules", len(contents.modules), expected.modules, "the family's targets have a LoRA each")
    return Rung("weights", (modules, *_file(contents, expected)))


# --- pictures and files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """What was measured of pictures, values 0..1.

    floor: mean absolute difference of two pictures of the base from one seed.
    shift: mean absolute change by the LoRA on prompts of the training; other: on prompts without what it learnt.
    reload: largest difference between the file's picture and that of the trained weights.
    spread: standard deviation of the LoRA's pictures by that of the base's, the smallest.
    closer: share of seeds with latents closer (cosine) to a training picture's than the base's.
    """

    floor: float
    shift: float
    reload: float
    spread: float
    other: float | None = None
    closer: float | None = None


def compare(pictures: Pictures, dtype: str, device: str = "cpu", steps: int = RUNGS[-1]) -> Rung:
    """Base against LoRA from the same seeds.

    Args:
        pictures: what was measured.
        dtype: of the file: f32, f16 or bf16.
        device: cpu or cuda.
        steps: that it was trained; after less than 100, pictures need not have changed yet.
    """
    least = max(SHIFT, _FLOORS * pictures.floor)
    rows = [
        _at_most("noise floor", pictures.floor, _FLOOR[device], "the base's picture twice"),
        _at_least("shift", pictures.shift, least, "mean change of a pixel", warning=steps < RUNGS[2]),
        _at_most("collapse", pictures.shift, _COLLAPSED, "a change this large is seldom wanted", warning=True),
        _at_most("reload", pictures.reload, RELOAD[dtype], "the file's picture against the trained weights'"),
        _at_least("not blank", pictures.spread, _BLANK, "standard deviation by that of the base's picture"),
    ]
    if pictures.other is not None and pictures.shift:
        words = "change of prompts without what was learnt, by that of prompts with it"
        rows.append(_at_most("other prompts", pictures.other / pictures.shift, 1, words, warning=True))
    if pictures.closer is not None:
        rows.append(_at_least("closer to the training", pictures.closer, 0.5, "share of seeds"))
    return Rung("compare", tuple(rows))


def conditions(
    not_constant: Sequence[str], apart: float, trained_on: str, evaluated_on: str, limit: float = 0.0
) -> Rung:
    """What a LoRA is trained under is what pictures are made under.

    Args:
        not_constant: names of conditions that training could change.
        apart: largest difference between conditions of the shards and what the encoders make of the captions now.
        trained_on: digest of the base that the LoRA was trained on.
        evaluated_on: of the base that pictures are made with.
        limit: of `apart`; 0 where the encoders compute as they did, in the same numbers on the same device.
    """
    rows = (
        _equal("variable conditions", len(not_constant), 0, ", ".join(not_constant) or "fixed ones are constants"),
        _at_most("encoded", apart, limit, "tokenizer, template and encoder give what is in the shards"),
        _equal("base", evaluated_on, trained_on, "VAE and encoders in training and for pictures"),
    )
    return Rung("conditions", rows)


def resume(same_bytes: bool, loss_difference: float, device: str = "cpu") -> Rung:
    """Stopped half way and resumed, against a run that was not: the file, and the largest difference of a loss."""
    if device == "cpu":
        row = Row("file", same_bytes, same_bytes, "the same bytes", "as of a run that was not stopped")
    else:
        row = _at_most("losses", loss_difference, 1e-6, "as of a run that was not stopped")
    return Rung("resume", (row,))


def engines(refused: Mapping[str, bool], applied: tuple[int, int] | None) -> Rung:
    """What others make of the file.

    Args:
        refused: by the name of another family, whether its pipeline refuses the file.
        applied: tensors that the engine said it applied, and of how many; None: it was not run.
    """
    rows = [
        Row(f"refused by {name}", passed, passed, "refused", "a LoRA of another family")
        for name, passed in refused.items()
    ]
    if applied is not None:
        rows.append(_equal("applied by ggk", applied[0], applied[1], "of the file's tensors"))
    return Rung("engines", tuple(rows))


def to_json(rungs: Iterable[Rung], **more: Any) -> dict[str, Any]:
    """The content of ladder.json: `passed` of all, and the rungs with their rows."""
    rungs = list(rungs)
    return more | {
        "passed": all(rung.passed for rung in rungs),
        "rungs": [
            {"name": rung.name, "passed": rung.passed, "rows": [asdict(row) for row in rung.rows]} for rung in rungs
        ],
    }


def failures(content: Mapping[str, Any]) -> list[str]:
    """What failed, a line each, of the content of ladder.json."""
    return [
        f"{rung['name']}: {row['name']} is {'no number' if row['value'] is None else row['value']}, and should be "
        f"{row['limit']} ({row['words']})"
        for rung in content["rungs"]
        for row in rung["rows"]
        if not row["passed"] and not row["warning"]
    ]
