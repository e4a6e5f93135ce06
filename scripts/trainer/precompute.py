"""A block of shards: teacher rows and student states of the samples that belong to it.

Each shard is computed by itself, in batches that only its own samples decide, so that it comes out the same whichever
others were there already. A shard that is whole and made from the same inputs is left alone.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import corpus_files, devices, packs, shards, students, teachers, tokenization
from trainer.config import Settings
from trainer.control import Requests
from trainer.corpus_files import Sample
from trainer.errors import TrainerError
from trainer.files import digest
from trainer.job import Progress, log
from trainer.materials import Record
from trainer.teachers.synthetic import Synthetic

FORMAT = 1  # of the shard file; raise it when older shards must not be read


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids: of the student, and of the teacher (the slots)."""

    sample: Sample
    student: list[int]
    slots: list[int]

    @property
    def tokens(self) -> int:
        """The longer of the two."""
        return max(len(self.student), len(self.slots))


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

    def __init__(self, settings: Settings, records: dict[str, Record], requests: Requests) -> None:
        self.settings, self.options, self.records, self.requests = settings, settings.precompute, records, requests
        self.pack = packs.get(settings.pack)
        self.device = devices.pick(settings.precompute.device)
        self.made_from = made_from(settings, records)
        self.skipped: list[dict[str, str]] = []

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
                stale.append((file, samples[number], inputs))
                if reason != "missing":
                    log.info("%s is rebuilt: %s", file, reason)
        total = sum(len(mine) for _, mine, _ in stale)
        if total:
            self._load()
        elif not stale:
            log.info("all %d shards are there and right", each)
        progress = Progress(f"precompute on {self.device}", total, "prompts")
        for file, mine, inputs in stale:
            self._fill_one(file, mine, inputs, progress)
        return self.made_from | {"of": blocks * each, "shards": [_entry(file) for file in files]}

    def _load(self) -> None:
        """The student first: it is checked against the pack before any teacher is loaded."""
        student, tokenizer = self.records["student"], self.records.get("tokenizer")
        shape = self.settings.adapter
        info = students.inspect(Path(student.path))
        students.check(info, self.pack, shape.student_dim)
        self.tokenizer = tokenization.student_tokenizer(Path(student.path), tokenizer and Path(tokenizer.path))
        students.check_tokenizer(info, self.tokenizer)
        dtype = devices.dtype(self.options.student_dtype, self.device)
        self.student = students.load(Path(student.path), self.pack.student, dtype, self.device)
        if self.options.teacher == "synthetic":
            log.info("synthetic teacher: the targets are made up and the adapter is for testing only")
            self.teacher = Synthetic(shape.vocabulary, shape.teacher_dim, shape.queries)
        else:
            dtype = devices.dtype(self.options.teacher_dtype, self.device)
            teacher = Path(self.records["teacher"].path)
            self.teacher = teachers.load(self.pack.teacher, teacher, dtype, self.device)
        log.info("student and teacher are loaded")

    def _fill_one(self, file: Path, samples: list[Sample], inputs: str, progress: Progress) -> None:
        encoded, skipped = self._encode(samples)
        batches = list(self._batches(encoded))
        partial = file.with_suffix(".partial")
        rows = self._resume(partial, inputs)
        done = 0
        for batch in batches:
            if all(item.sample.id in rows for item in batch):
                done += len(batch)
                continue
            if self.requests.stop():
                header = {"inputs": inputs}
                shards.write(partial, [r for r in rows.values() if r], header, self._dims())
                raise TrainerError(
                    f"stopped as asked: {len(rows)} of {len(encoded)} prompts of {file.name} are kept; the same "
                    "command goes on there"
                )
            for item, row in zip(batch, self._compute(batch), strict=True):
                rows[item.sample.id] = row
                if row is None:
                    skipped.append((item.sample.id, "non-finite rows"))
            progress.update(len(batch))
        progress.update(done + len(samples) - len(encoded))
        self._refuse_too_many(file, skipped, len(samples))
        kept = [rows[item.sample.id] for item in encoded if rows[item.sample.id] is not None]
        header = self.made_from | {
            "pack": self.pack.name,
            "inputs": inputs,
            "computed_on": str(self.device),
            "skipped": [{"id": id, "reason": reason} for id, reason in skipped],
        }
        shards.write(file, kept, header, self._dims())
        for leftover in (partial, file.with_suffix(".damaged")):
            leftover.unlink(missing_ok=True)

    def _dims(self) -> tuple[int, int]:
        return self.settings.adapter.student_dim, self.settings.adapter.teacher_dim

    def _encode(self, samples: list[Sample]) -> tuple[list[Encoded], list[tuple[str, str]]]:
        """Token ids of the samples that fit the student; the others as (id, reason)."""
        if not samples:
            return [], []
        texts = [sample.text for sample in samples]
        encoded, skipped = [], []
        students_ids = self.tokenizer.encode(texts, self.pack.template)
        slots = self.teacher.tokenize(texts, self.settings.adapter.queries)
        for item in map(Encoded, samples, students_ids, slots):
            if len(item.student) > self.pack.max_student_tokens:
                skipped.append((item.sample.id, f"longer than {self.pack.max_student_tokens} student tokens"))
            else:
                encoded.append(item)
        return encoded, skipped

    def _batches(self, encoded: list[Encoded]) -> Iterator[list[Encoded]]:
        """Length-sorted batches whose padded size stays within the token budget."""
        budget = self.options.batch_tokens or (16384 if self.device.type == "cuda" else 2048)
        batch: list[Encoded] = []
        for item in sorted(encoded, key=lambda item: (item.tokens, item.sample.id)):
            if batch and item.tokens * (len(batch) + 1) > budget:
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _resume(self, partial: Path, inputs: str) -> dict[str, shards.Rows | None]:
        """Rows that an earlier, stopped job had computed of this shard, whole batches of them."""
        if shards.why_stale(partial, inputs):
            return {}
        shard = shards.Shard(partial)
        return {row.id: row for row in map(shard.rows, range(len(shard)))}

    @torch.inference_mode()
    def _compute(self, batch: list[Encoded]) -> list[shards.Rows | None]:
        """Rows of a batch in bf16 on the CPU; None for a sample with a non-finite value."""
        try:
            states, rows = self._run_models(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise TrainerError(
                    f"out of memory on {self.device} with a single prompt: set precompute.device to another one"
                ) from None
            states = None
        if states is None:  # outside of `except`, which holds on to the memory
            log.info("out of memory with %d prompts: trying halves", len(batch))
            middle = len(batch) // 2
            return self._compute(batch[:middle]) + self._compute(batch[middle:])
        result: list[shards.Rows | None] = []
        for item, state, row in zip(batch, states, rows, strict=True):
            slots = item.slots if self.settings.adapter.vocabulary else []
            student, target = state[: len(item.student)].clone(), row[: len(slots) or None].clone()
            finite = bool(torch.isfinite(student).all() and torch.isfinite(target).all())
            result.append(shards.Rows(item.sample.id, slots, student, target) if finite else None)
        return result

    def _run_models(self, batch: list[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
        """Student states [B, L, student_dim] and teacher rows [B, P, teacher_dim], bf16 on the CPU."""
        states = self.student.states(_pad([item.student for item in batch]).to(self.device))
        lengths = torch.tensor([len(item.slots) for item in batch], device=self.device)
        rows = self.teacher.encode(_pad([item.slots for item in batch]).to(self.device), lengths)
        return states.to("cpu", torch.bfloat16), rows.to("cpu", torch.bfloat16)

    def _refuse_too_many(self, file: Path, skipped: list[tuple[str, str]], count: int) -> None:
        for id, reason in skipped:
            log.info("skipped sample %s: %s", id, reason)
        if len(skipped) > max(1, self.options.max_bad_fraction * count):
            reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(reason for _, reason in skipped).items())
            raise TrainerError(
                f"{len(skipped)} of {count} samples of {file.name} cannot be used ({reasons}): look at the prompts, or "
                "raise precompute.max_bad_fraction"
            )


def _pad(ids: list[list[int]]) -> torch.Tensor:
    """[B, L] int64, right padded with 0."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)


def _entry(file: Path) -> dict[str, Any]:
    header = shards.Shard(file).header
    skipped = Counter(item["reason"] for item in header["skipped"])
    kept = {key: header[key] for key in ("samples", "rows", "student_rows", "checksum")}
    return {"file": file.name, "bytes": file.stat().st_size, "skipped": dict(skipped), **kept}
