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

from trainer import corpus_files, devices, packs, shards, students, teachers, tokenization
from trainer.config import Settings
from trainer.control import Requests
from trainer.corpus_files import Sample
from trainer.devices import Budget
from trainer.errors import TrainerError
from trainer.files import digest
from trainer.job import Progress, log
from trainer.materials import Record
from trainer.streaming import Activations, Executor, Part, State
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


@dataclass(frozen=True)
class Batch:
    """Samples of one shard (by its number among the stale ones) that are computed together."""

    shard: int
    items: list[Encoded]


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
        if stale:
            self._make(stale, output.with_suffix(".partial"))
        else:
            log.info("all %d shards are there and right", each)
        return self.made_from | {"of": blocks * each, "shards": [_entry(file) for file in files]}

    def _make(self, stale: list[Stale], partial: Path) -> None:
        """Make shards; `partial` is the folder for what a stop leaves."""
        options = self.options
        info = self._student_info()
        device = devices.pick(options.device)
        teacher = self._teacher(device)
        for shard in stale:
            self._encode(shard, teacher)
        budget = devices.budget(device, options.gpu_gib, options.ram_gib, self.granted)
        tokens = options.batch_tokens or devices.batch_tokens(device, budget)
        log.info("batches of %d tokens on %s", tokens, device)

        batches = _batched(stale, lambda item: len(item.student), tokens)
        dtype = devices.dtype(options.student_dtype, device)
        student = students.load(info.path, self.pack.student, dtype, device)
        executor = Executor("student", [Part("student", student, {})], None, device, budget)
        states = self._activations(stale, batches, lambda item: item.student, partial / "student")
        finish = _finish(batches, lambda item: len(item.student))
        for _ in self._run("student", executor, batches, states, finish):
            pass
        del student, executor
        if device.type == "cuda":
            torch.cuda.empty_cache()
        students_rows = _Results(batches, states)

        batches = _batched(stale, lambda item: len(item.teacher) + (teacher.rows or 0), tokens)
        left = Budget(budget.device, budget.ram - states.held)
        executor = Executor("teacher", teacher.parts, teacher.weights, device, left)
        rows = self._activations(stale, batches, lambda item: item.teacher, partial / "teacher")
        finish = _finish(batches, lambda item: teacher.rows or len(item.teacher))
        teachers_rows = _Results(batches, rows)
        with ThreadPoolExecutor(1, "writer") as writer:
            written: Future | None = None
            for number in self._run("teacher", executor, batches, rows, finish):
                batch = batches[number]
                if number + 1 == len(batches) or batches[number + 1].shard != batch.shard:
                    made = self._collect(stale[batch.shard], batch.shard, students_rows, teachers_rows)
                    if written:
                        written.result()  # one waits at most: a shard may be gigabytes
                    written = writer.submit(shards.write, stale[batch.shard].file, *made)
            if written:
                written.result()
        for shard in stale:
            if not shard.encoded:
                shards.write(shard.file, [], self._header(shard), self._dims())
            shard.file.with_suffix(".damaged").unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)

    def _student_info(self) -> students.StudentInfo:
        """The student, checked against the pack before any teacher is looked at; and its tokenizer."""
        student, tokenizer = self.records["student"], self.records.get("tokenizer")
        info = students.inspect(Path(student.path))
        students.check(info, self.pack, self.settings.adapter.student_dim)
        self.tokenizer = tokenization.student_tokenizer(Path(student.path), tokenizer and Path(tokenizer.path))
        students.check_tokenizer(info, self.tokenizer)
        return info

    def _teacher(self, device: torch.device) -> teachers.Teacher:
        shape = self.settings.adapter
        if self.options.teacher == "synthetic":
            log.info("synthetic teacher: the targets are made up and the adapter is for testing only")
            return Synthetic(shape.vocabulary, shape.teacher_dim)
        path = Path(self.records["teacher"].path)
        teacher = teachers.load(self.pack.teacher, path, devices.dtype(self.options.teacher_dtype, device))
        found, needed = (teacher.dim, teacher.vocabulary), (shape.teacher_dim, shape.vocabulary)
        if found != needed:
            raise TrainerError(
                f"the teacher in {path} has rows of {found[0]} and {found[1]} token ids, the {self.pack.name} pack "
                f"needs {needed[0]} and {needed[1]}: set materials.paths.teacher to the right one"
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
        ids = teacher.tokenize(texts, self.settings.adapter.queries)
        for item in map(Encoded, shard.samples, self.tokenizer.encode(texts), ids):
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

    def _activations(
        self, stale: list[Stale], batches: list[Batch], ids: Callable[[Encoded], list[int]], folder: Path
    ) -> Activations:
        """The batches as a model gets them, or as an earlier job left them."""
        states = [_padded([ids(item) for item in batch.items]) for batch in batches]
        keys = [digest([stale[b.shard].inputs, [item.sample.id for item in b.items]]) for b in batches]
        return Activations(states, keys, folder)

    def _run(
        self, name: str, executor: Executor, batches: list[Batch], states: Activations, finish: Callable[..., State]
    ) -> Iterator[int]:
        parts = len(executor.parts)
        progress = Progress(f"{name} on {executor.device}", sum(len(b.items) for b in batches), "prompts")
        progress.skip(sum(len(b.items) * n / parts for b, n in zip(batches, states.levels, strict=True)))

        def count(number: int) -> None:
            progress.update(len(batches[number].items) / parts)

        return executor.run(states, finish, self.requests.stop, count)

    def _collect(self, shard: Stale, number: int, student: "_Results", teacher: "_Results") -> tuple[Any, ...]:
        """The arguments of `shards.write` for a shard whose samples are all computed."""
        states, student_moments = student.take(number)
        rows, moments = teacher.take(number)
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
        # They count every finite row, also of a sample whose other half is not.
        complete = len(kept) == len(shard.encoded)
        return kept, self._header(shard), self._dims(), (student_moments, moments) if complete else None


class _Results:
    """What a model made of the samples of each shard."""

    def __init__(self, batches: list[Batch], states: Activations) -> None:
        self.batches, self.states = batches, states

    def take(self, shard: int) -> tuple[dict[str, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]:
        """Rows of each sample by id, None where they are not finite; sums and sums of squares over them [D] f64."""
        found, sums, squares = {}, [], []
        for number, batch in enumerate(self.batches):
            if batch.shard == shard:
                state = self.states.state(number)
                for item, rows, count in zip(batch.items, state["rows"], state["counts"].tolist(), strict=True):
                    found[item.sample.id] = rows[:count] if count else None
                sums.append(state["sum"])
                squares.append(state["sumsq"])
                self.states.drop(number)
        return found, (torch.stack(sums).sum(0), torch.stack(squares).sum(0))


def _finish(batches: list[Batch], rows_of: Callable[[Encoded], int]) -> Callable[[int, State], State]:
    """What is kept of the last state of a batch: rows in bf16, how many of them count (0: not finite), and moments."""

    def finish(number: int, state: State) -> State:
        rows = state["rows"].to(torch.bfloat16)
        counts = torch.tensor([rows_of(item) for item in batches[number].items], device=rows.device)
        real = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        rows = rows.masked_fill(~real[..., None], 0)
        finite = torch.isfinite(rows).flatten(1).all(1)
        rows = torch.where(finite[:, None, None], rows, 0)
        wide = rows.float()  # the square of a bf16 number is exact in f32
        kept = {
            "rows": rows,
            "counts": counts * finite,
            "sum": wide.sum((0, 1), dtype=torch.float64),
            "sumsq": wide.square().sum((0, 1), dtype=torch.float64),
        }
        return {name: tensor.cpu() for name, tensor in kept.items()}

    return finish


def _batched(stale: list[Stale], tokens: Callable[[Encoded], int], budget: int) -> list[Batch]:
    """Length-sorted batches of each shard whose padded size stays within the token budget."""
    batches = []
    for number, shard in enumerate(stale):
        items: list[Encoded] = []
        for item in sorted(shard.encoded, key=lambda item: (tokens(item), item.sample.id)):
            if items and tokens(item) * (len(items) + 1) > budget:
                batches.append(Batch(number, items))
                items = []
            items.append(item)
        if items:
            batches.append(Batch(number, items))
    return batches


def _padded(ids: list[list[int]]) -> State:
    """Ids [B, L] int64, right padded with 0, and lengths [B]."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    return {"ids": padded, "lengths": torch.tensor([len(row) for row in ids])}


def _entry(file: Path) -> dict[str, Any]:
    header = shards.Shard(file).header
    skipped = Counter(item["reason"] for item in header["skipped"])
    kept = {key: header[key] for key in ("samples", "rows", "student_rows", "checksum")}
    return {"file": file.name, "bytes": file.stat().st_size, "skipped": dict(skipped), **kept}
