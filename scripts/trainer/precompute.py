"""A block of shards: teacher rows and student states of the samples that belong to it.

Each shard is made in batches that only its own samples decide, so that it comes out the same whichever others were
there already. A shard that is whole and made from the same inputs is left alone. The others go through the student
together, then through the teacher, which may be larger than the memory there is (`trainer.streaming`).
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer import corpus_files, devices, packs, shard_index, shards, streaming, students, teachers, tokenization
from trainer.config import Settings
from trainer.control import Requests
from trainer.corpus_files import Sample
from trainer.devices import Budget
from trainer.errors import StoppedError, TrainerError
from trainer.files import digest
from trainer.job import log
from trainer.materials import Record
from trainer.passes import Item, Pass, RowsPass, padded
from trainer.shards import Moments
from trainer.streaming import Executor, Part, State
from trainer.teachers.synthetic import Synthetic
from trainer.weights import Weights

# Of the memory that may be used, what the results of one model may take.
_SHARE_OF_RESULTS = 0.25


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids, of the student and of the teacher."""

    sample: Sample
    student: list[int]
    teacher: list[int]


@dataclass
class Stale:
    """A shard to be made: its file, its samples, and the digest of everything it is made from.

    encoded: the samples that fit, as the models read them; skipped: ids of the others, and why.
    """

    file: Path
    samples: list[Sample]
    inputs: str
    encoded: list[Any] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


# Rows of the samples of a shard, and the moments of all student and of all teacher rows.
Collected = tuple[list[shards.Rows], tuple[Moments, Moments]]


@dataclass(frozen=True)
class Step:
    """A model that all samples of a block go through.

    parts: gives its steps; called when it is its turn.
    weights: what they are read from, None where they hold their values.
    """

    run: Pass
    parts: Callable[[], list[Part]]
    weights: Weights | None


def discard(output: Path) -> None:
    """Remove what was computed of a block's shards that are not finished; `output` is the file for its list."""
    for place in output.parent.glob(f"{output.stem}*.partial"):  # a folder, or of LoRAs files
        shutil.rmtree(place) if place.is_dir() else place.unlink()


def made_from(settings: Settings, records: dict[str, Record]) -> dict[str, Any]:
    """What every row of the run's shards depends on, the samples themselves aside."""
    pack = packs.get(settings.pack)
    synthetic = settings.precompute.teacher == "synthetic"
    shape = settings.adapter
    # Shards without are older than this setting.
    storage = {} if settings.precompute.storage == "bf16" else {"storage": settings.precompute.storage}
    return {
        "format": shard_index.FORMAT,
        "contract": pack.contract,
        "synthetic": synthetic,
        "teacher": None if synthetic else records["teacher"].digest,
        "student": records["student"].digest,
        "tokenizer": records["tokenizer"].digest if "tokenizer" in records else None,
        "dims": [shape.student_dim, shape.teacher_dim, shape.queries, shape.vocabulary],
        "dtypes": [settings.precompute.teacher_dtype, settings.precompute.student_dtype],
    } | storage


class Block:
    """The shards of one job and the models that fill them; models are loaded when the first one is needed.

    Samples are texts. Those of packs with pictures are `trainer.precompute_pictures`'s.
    """

    def __init__(self, settings: Settings, records: dict[str, Record], requests: Requests, granted: int) -> None:
        """`granted` is how many bytes of main memory the job may use at most, where the settings leave it open."""
        self.settings, self.options, self.records, self.requests = settings, settings.precompute, records, requests
        self.pack = packs.get(settings.pack)
        self.granted = granted
        self.made_from = made_from(settings, records)
        shape = settings.adapter
        self.dims: tuple[int, ...] = (shape.student_dim, shape.teacher_dim)

    def fill(self, output: Path, block: int, blocks: int, corpus: Path) -> dict[str, Any]:
        """Make the shards of a block right; they lie beside `output`.

        Args:
            output: the file for the block's list, such as shards/train/0003.json.
            block: its number.
            blocks: how many there are in the split.
            corpus: the samples of the split.

        Returns:
            The list: what the shards are made from, of how many in the split they are some, and what each holds.

        Raises:
            TrainerError: asked to stop (what was computed is kept), too many bad samples, models that do not fit.
        """
        each = self.options.block_shards
        samples = defaultdict(list)
        for sample in corpus_files.read(corpus):
            samples[sample.shard(blocks * each)].append(sample)
        files = [output.with_name(f"{output.stem}-{number:02d}.safetensors") for number in range(each)]
        stale = []
        for number, file in enumerate(files, block * each):
            inputs = digest([self.made_from, [[s.id, s.text, *s.images] for s in samples[number]]])
            if reason := self._why_stale(file, inputs):
                stale.append(Stale(file, samples[number], inputs))
                if reason != "missing":
                    log.info("%s is rebuilt: %s", file, reason)
        for shard in stale:
            if not shard.samples:
                self._write(shard, [])
        stale = [shard for shard in stale if shard.samples]
        partial = output.with_suffix(".partial")
        if stale:
            self.folder = corpus.parent / "images"
            try:
                self._make(stale, partial)
            except torch.OutOfMemoryError:  # where no smaller batch would help: models and weights
                raise TrainerError(
                    f"out of memory on {self.device} while models were loaded or rows kept: free some of its memory, "
                    "lower precompute.gpu_gib or precompute.batch_tokens, or set precompute.device to another one"
                ) from None
        else:
            log.info("all %d shards are there and right", each)
        shutil.rmtree(partial, ignore_errors=True)
        for file in files:
            file.with_suffix(".damaged").unlink(missing_ok=True)
        return self.made_from | {"of": blocks * each, "shards": [_entry(file) for file in files]}

    def _make(self, stale: list[Stale], partial: Path) -> None:
        """Make shards; `partial` is the folder for what a stop leaves."""
        info = self._student_info()
        self.device = devices.pick(self.options.device)
        self._load_teacher()
        for number, shard in enumerate(stale):
            self._encode(shard, number)
            self._refuse_too_many(shard)
        budget = devices.budget(self.device, self.options.gpu_gib, self.options.ram_gib, self.granted)
        self.tokens = self.options.batch_tokens or devices.batch_tokens(self.device, budget)
        log.info("batches of %d tokens on %s", self.tokens, self.device)
        steps = self._steps(lambda: [Part("student", self._student(info), {})], stale, partial)
        try:
            for step in steps[:-1]:
                # What waits for the models behind it leaves them most of the memory.
                room = min(int(_SHARE_OF_RESULTS * budget.ram), budget.ram - streaming.needed(self.teacher.parts))
                for _ in self._run(step, budget, max(0, room)):
                    pass
                budget = Budget(budget.device, budget.ram - step.run.kept.held)
            with ThreadPoolExecutor(1, "writer") as writer:
                written: Future | None = None
                for number in self._run(steps[-1], budget):
                    if written:
                        written.result()  # one at most is in memory besides: a shard may be gigabytes
                    shard = stale[number]
                    made = self._collect(shard, number, [step.run for step in steps])
                    for id, reason in shard.skipped:
                        log.info("skipped sample %s: %s", id, reason)
                    self._refuse_too_many(shard)
                    written = writer.submit(self._write, shard, *made)
                    del made
                if written:
                    written.result()
        except StoppedError:
            for step in steps:
                step.run.kept.save()
            raise
        for shard in stale:
            if not shard.encoded:
                self._write(shard, [])

    def _run(self, step: Step, budget: Budget, keep: int | None = None) -> Iterator[int]:
        """Go through one model; gives the number of each shard that it is done with."""
        executor = Executor(step.run.name, step.parts(), step.weights, self.device, budget, keep)
        yield from step.run.run(executor, self.requests.stop)
        del executor
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _student_info(self) -> students.StudentInfo:
        """The student, checked against the pack before any teacher is looked at; and its tokenizer."""
        student, tokenizer = self.records["student"], self.records.get("tokenizer")
        info = students.inspect(Path(student.path))
        students.check(info, self.pack, self.settings.adapter.student_dim)
        self.tokenizer = tokenization.student_tokenizer(Path(student.path), tokenizer and Path(tokenizer.path))
        students.check_tokenizer(info, self.tokenizer)
        return info

    def _student(self, info: students.StudentInfo) -> students.Student:
        dtype = devices.dtype(self.options.student_dtype, self.device)
        return students.load(info.path, self.pack.student, dtype, self.device)

    def _load_teacher(self) -> None:
        """The teacher, checked against the pack; its weights are not read yet."""
        if self.options.teacher == "synthetic":
            log.info("synthetic teacher: the targets are made up and the adapter is for testing only")
            self.teacher = self._synthetic()
            return
        path = Path(self.records["teacher"].path)
        self.teacher = teachers.load(self.pack.teacher, path, devices.dtype(self.options.teacher_dtype, self.device))
        for what, (found, needed) in self._sizes().items():
            if found != needed:
                raise TrainerError(
                    f"the teacher in {path} has the {what} {found}, the {self.pack.name} pack needs {needed}: set "
                    "materials.paths.teacher to the right one"
                )

    def _synthetic(self) -> Any:
        shape = self.settings.adapter
        return Synthetic(shape.vocabulary, shape.teacher_dim, shape.queries)

    def _sizes(self) -> dict[str, tuple[int | None, int | None]]:
        """Sizes of the teacher and what the pack needs."""
        shape, teacher = self.settings.adapter, self.teacher
        sizes = {"row size": (teacher.dim, shape.teacher_dim), "vocabulary": (teacher.vocabulary, shape.vocabulary)}
        return sizes | ({"queries": (teacher.rows, shape.queries)} if teacher.rows else {})

    def _encode(self, shard: Stale, number: int) -> None:
        """What the models read of the samples that fit the student; the others are skipped."""
        texts = [sample.text for sample in shard.samples]
        prompted = ["".join(self.pack.template.around(text)) for text in texts]
        ids = self.teacher.tokenize(prompted, self.settings.adapter.queries)
        for item in map(Encoded, shard.samples, self.tokenizer.encode(texts, self.pack.template), ids):
            self._add(shard, item.sample, item, len(item.student))

    def _add(self, shard: Stale, sample: Sample, encoded: Any, tokens: int) -> None:
        """Take up a sample, unless it has more tokens than the student may read."""
        if tokens > self.pack.max_student_tokens:
            shard.skipped.append((sample.id, f"longer than {self.pack.max_student_tokens} student tokens"))
        else:
            shard.encoded.append(encoded)

    def _refuse_too_many(self, shard: Stale) -> None:
        if shard.file.parent.name == "probe":
            return  # nobody could mend these prompts, and no training depends on them
        if len(shard.skipped) > max(1, self.options.max_bad_fraction * len(shard.samples)):
            reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(reason for _, reason in shard.skipped).items())
            raise TrainerError(
                f"{len(shard.skipped)} of {len(shard.samples)} samples of {shard.file.name} cannot be used ({reasons})"
                f": {self._remedy()}, or raise precompute.max_bad_fraction"
            )

    def _why_stale(self, file: Path, inputs: str) -> str | None:
        return shards.why_stale(file, inputs)

    def _remedy(self) -> str:
        return "look at the prompts"

    def _inputs(self, stale: list[Stale]) -> list[str]:
        """What a partial result of each shard depends on: what "auto" means may differ on another device."""
        options = self.options
        kinds = [str(devices.dtype(it, self.device)) for it in (options.teacher_dtype, options.student_dtype)]
        return [digest([shard.inputs, *kinds]) for shard in stale]

    def _steps(self, student: Callable[[], list[Part]], stale: list[Stale], partial: Path) -> list[Step]:
        """The models in their order; the last one is the teacher, behind which shards are written."""
        inputs = self._inputs(stale)

        def texts(name: str, read: Callable[[Encoded], list[int]], rows: int | None) -> Pass:
            def item(encoded: Encoded) -> Item:
                ids = len(read(encoded))
                wanted = torch.ones(rows or ids, dtype=torch.bool)
                return Item(encoded.sample.id, ids + (rows or 0), encoded, wanted)

            def make(batch: list[Encoded]) -> State:
                return padded([read(encoded) for encoded in batch])

            items = [[item(encoded) for encoded in shard.encoded] for shard in stale]
            return RowsPass(name, items, inputs, self.tokens, partial / name, make)

        teacher = texts("teacher", lambda encoded: encoded.teacher, self.teacher.rows)
        return [
            Step(texts("student", lambda encoded: encoded.student, None), student, None),
            Step(teacher, lambda: self.teacher.parts, self.teacher.weights),
        ]

    def _collect(self, shard: Stale, number: int, passes: list[Pass]) -> Collected:
        """The rows of a shard whose samples are all computed, and their moments."""
        (states, student_moments), (rows, moments) = (it.take(number) for it in passes)
        kept = []
        for item in shard.encoded:
            state, target = states[item.sample.id], rows[item.sample.id]
            if state is None or target is None:
                shard.skipped.append((item.sample.id, "non-finite rows"))
            else:
                slots = item.teacher if self.settings.adapter.vocabulary else []
                kept.append(shards.Rows(item.sample.id, slots, state, target))
        return kept, (student_moments, moments)

    def _write(self, shard: Stale, rows: list[shards.Rows], moments: tuple[Moments, Moments] | None = None) -> None:
        header = self.made_from | {"pack": self.pack.name, "inputs": shard.inputs}
        header["skipped"] = [{"id": id, "reason": reason} for id, reason in shard.skipped]
        # They count every sample, also those that were dropped just now.
        whole = len(rows) == len(shard.encoded)
        shards.write(shard.file, rows, header, self.dims, moments if whole else None, self.options.storage)


def _entry(file: Path) -> dict[str, Any]:
    header = shards.Shard(file).header
    skipped = Counter(item["reason"] for item in header["skipped"])
    kept = {key: header[key] for key in ("samples", "rows", "student_rows", "checksum")}
    return {"file": file.name, "bytes": file.stat().st_size, "skipped": dict(skipped), **kept}
