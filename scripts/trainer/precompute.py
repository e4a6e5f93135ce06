"""A block of shards: teacher rows and student states of the samples that belong to it.

Each shard is made in batches that only its own samples decide, so that it comes out the same whichever others were
there already. A shard that is whole and made from the same inputs is left alone. The others go through the student
together, then through the teacher, which may be larger than the memory there is (`trainer.streaming`).
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer import corpus_files, devices, packs, shards, streaming, students, teachers, tokenization
from trainer.config import Settings
from trainer.control import Requests
from trainer.corpus_files import Sample
from trainer.devices import Budget
from trainer.errors import TrainerError
from trainer.files import digest
from trainer.job import log
from trainer.materials import Record
from trainer.passes import Item, Pass, Taken
from trainer.streaming import Executor, Part
from trainer.teachers.synthetic import Synthetic

FORMAT = 1  # of the shard file; raise it when older shards must not be read


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids, of the student and of the teacher."""

    sample: Sample
    student: list[int]
    teacher: list[int]


@dataclass
class Stale:
    """A shard to be made: its file, its samples, and the digest of everything it is made from."""

    file: Path
    samples: list[Sample]
    inputs: str
    encoded: list[Encoded] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def made_from(settings: Settings, records: dict[str, Record]) -> dict[str, Any]:
    """What every row of the run's shards depends on, the samples themselves aside."""
    pack = packs.get(settings.pack)
    synthetic = settings.precompute.teacher == "synthetic"
    shape = settings.adapter
    return {
        "format": FORMAT,
        "contract": pack.contract,
        "synthetic": synthetic,
        "teacher": None if synthetic else records["teacher"].digest,
        "student": records["student"].digest,
        "tokenizer": records["tokenizer"].digest if "tokenizer" in records else None,
        "dims": [shape.student_dim, shape.teacher_dim, shape.queries, shape.vocabulary],
        "dtypes": [settings.precompute.teacher_dtype, settings.precompute.student_dtype],
    }


class Block:
    """The shards of one job and the models that fill them; models are loaded when the first one is needed."""

    def __init__(self, settings: Settings, records: dict[str, Record], requests: Requests, granted: int) -> None:
        """`granted` is how many bytes of main memory the job may use at most, where the settings leave it open."""
        self.settings, self.options, self.records, self.requests = settings, settings.precompute, records, requests
        self.pack = packs.get(settings.pack)
        self.granted = granted
        self.made_from = made_from(settings, records)

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
            inputs = digest([self.made_from, [[s.id, s.text] for s in samples[number]]])
            if reason := shards.why_stale(file, inputs):
                stale.append(Stale(file, samples[number], inputs))
                if reason != "missing":
                    log.info("%s is rebuilt: %s", file, reason)
        for shard in stale:
            if not shard.samples:
                shards.write(shard.file, [], self._header(shard), self._dims())
        stale = [shard for shard in stale if shard.samples]
        partial = output.with_suffix(".partial")
        if stale:
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
        teacher = self._teacher()
        for shard in stale:
            self._encode(shard, teacher)
        budget = devices.budget(self.device, self.options.gpu_gib, self.options.ram_gib, self.granted)
        self.tokens = self.options.batch_tokens or devices.batch_tokens(self.device, budget)
        log.info("batches of %d tokens on %s", self.tokens, self.device)

        dtype = devices.dtype(self.options.student_dtype, self.device)
        parts = [Part("student", students.load(info.path, self.pack.student, dtype, self.device), {})]
        left = Budget(budget.device, max(0, budget.ram - streaming.needed(teacher.parts)))
        executor = Executor("student", parts, None, self.device, left)
        states = self._pass("student", stale, lambda item: (item.student, None), dtype, partial)
        for _ in states.run(executor, self.requests.stop):
            pass
        del parts, executor
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

        left = Budget(budget.device, budget.ram - states.kept.held)
        executor = Executor("teacher", teacher.parts, teacher.weights, self.device, left)
        dtype = devices.dtype(self.options.teacher_dtype, self.device)
        rows = self._pass("teacher", stale, lambda item: (item.teacher, teacher.rows), dtype, partial)

        def stop() -> bool:
            asked = self.requests.stop()
            if asked:
                states.kept.save()
            return asked

        with ThreadPoolExecutor(1, "writer") as writer:
            written: Future | None = None
            for number in rows.run(executor, stop):
                if written:
                    written.result()  # one at most is in memory besides: a shard may be gigabytes
                taken = states.take(number), rows.take(number)
                written = writer.submit(shards.write, stale[number].file, *self._collect(stale[number], *taken))
                del taken
            if written:
                written.result()
        for shard in stale:
            if not shard.encoded:
                shards.write(shard.file, [], self._header(shard), self._dims())

    def _student_info(self) -> students.StudentInfo:
        """The student, checked against the pack before any teacher is looked at; and its tokenizer."""
        student, tokenizer = self.records["student"], self.records.get("tokenizer")
        info = students.inspect(Path(student.path))
        students.check(info, self.pack, self.settings.adapter.student_dim)
        self.tokenizer = tokenization.student_tokenizer(Path(student.path), tokenizer and Path(tokenizer.path))
        students.check_tokenizer(info, self.tokenizer)
        return info

    def _teacher(self) -> teachers.Teacher:
        shape = self.settings.adapter
        if self.options.teacher == "synthetic":
            log.info("synthetic teacher: the targets are made up and the adapter is for testing only")
            return Synthetic(shape.vocabulary, shape.teacher_dim, shape.queries)
        path = Path(self.records["teacher"].path)
        teacher = teachers.load(self.pack.teacher, path, devices.dtype(self.options.teacher_dtype, self.device))
        needed = {"row size": shape.teacher_dim, "vocabulary": shape.vocabulary}
        found = {"row size": teacher.dim, "vocabulary": teacher.vocabulary}
        if teacher.rows:
            needed["queries"], found["queries"] = shape.queries, teacher.rows
        for what, value in needed.items():
            if found[what] != value:
                raise TrainerError(
                    f"the teacher in {path} has the {what} {found[what]}, the {self.pack.name} pack needs {value}: set "
                    "materials.paths.teacher to the right one"
                )
        return teacher

    def _dims(self) -> tuple[int, int]:
        return self.settings.adapter.student_dim, self.settings.adapter.teacher_dim

    def _header(self, shard: Stale) -> dict[str, Any]:
        skipped = [{"id": id, "reason": reason} for id, reason in shard.skipped]
        return self.made_from | {"pack": self.pack.name, "inputs": shard.inputs, "skipped": skipped}

    def _encode(self, shard: Stale, teacher: teachers.Teacher) -> None:
        """Token ids of the samples that fit the student; the others are skipped."""
        texts = [sample.text for sample in shard.samples]
        prompted = ["".join(self.pack.template.around(text)) for text in texts]
        ids = teacher.tokenize(prompted, self.settings.adapter.queries)
        for item in map(Encoded, shard.samples, self.tokenizer.encode(texts, self.pack.template), ids):
            if len(item.student) > self.pack.max_student_tokens:
                shard.skipped.append((item.sample.id, f"longer than {self.pack.max_student_tokens} student tokens"))
            else:
                shard.encoded.append(item)
        self._refuse_too_many(shard)

    def _refuse_too_many(self, shard: Stale) -> None:
        if len(shard.skipped) > max(1, self.options.max_bad_fraction * len(shard.samples)):
            reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(reason for _, reason in shard.skipped).items())
            raise TrainerError(
                f"{len(shard.skipped)} of {len(shard.samples)} samples of {shard.file.name} cannot be used ({reasons})"
                ": look at the prompts, or raise precompute.max_bad_fraction"
            )

    def _pass(
        self,
        name: str,
        stale: list[Stale],
        read: Callable[[Encoded], tuple[list[int], int | None]],
        dtype: torch.dtype,
        partial: Path,
    ) -> Pass:
        """The samples as a model reads them: ids, and the rows it makes of them (None: one for each id)."""
        items = []
        for shard in stale:
            items.append([])
            for encoded in shard.encoded:
                ids, rows = read(encoded)
                items[-1].append(Item(encoded.sample.id, ids, rows or len(ids), len(ids) + (rows or 0)))
        # What "auto" means may be another number type on the device that goes on with a stopped block.
        inputs = [digest([shard.inputs, str(dtype)]) for shard in stale]
        return Pass(name, items, inputs, self.tokens, partial / name)

    def _collect(self, shard: Stale, student: Taken, teacher: Taken) -> tuple[Any, ...]:
        """The arguments of `shards.write` for a shard whose samples are all computed."""
        (states, student_moments), (rows, moments) = student, teacher
        kept = []
        for item in shard.encoded:
            state, target = states[item.sample.id], rows[item.sample.id]
            if state is None or target is None:
                shard.skipped.append((item.sample.id, "non-finite rows"))
            else:
                slots = item.teacher if self.settings.adapter.vocabulary else []
                kept.append(shards.Rows(item.sample.id, slots, state, target))
        for id, reason in shard.skipped:
            log.info("skipped sample %s: %s", id, reason)
        self._refuse_too_many(shard)
        # They count every sample, also those that were dropped just now.
        whole = len(kept) == len(shard.encoded)
        return kept, self._header(shard), self._dims(), (student_moments, moments) if whole else None


def _entry(file: Path) -> dict[str, Any]:
    header = shards.Shard(file).header
    skipped = Counter(item["reason"] for item in header["skipped"])
    kept = {key: header[key] for key in ("samples", "rows", "student_rows", "checksum")}
    return {"file": file.name, "bytes": file.stat().st_size, "skipped": dict(skipped), **kept}
