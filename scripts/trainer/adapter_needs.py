"""What adapters need of a machine, besides what all runs do: see `trainer.doctor`."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from trainer import (
    corpus,
    corpus_files,
    demo_prompts,
    devices,
    materials,
    probe,
    prompt_sources,
    students,
    teachers,
    tokenization,
)
from trainer.config import Settings
from trainer.doctor import ANY, Check, Doctor, gb, note, ok, problem
from trainer.estimates import GB, WEIGHTS, Estimate, estimate, precompute_memory
from trainer.packs.base import Material
from trainer.prompt_cleaning import collapse, for_engine
from trainer.teachers.synthetic import Synthetic

_SAMPLED = 2000  # prompts that are tokenized
_READ = 200_000  # prompts that are read of a file


class AdapterDoctor(Doctor):
    """Checks of a run that trains an adapter."""

    def __init__(self, settings: Settings, granted: int) -> None:
        super().__init__(settings, granted)
        self.teacher: teachers.Teacher | None = None
        self.student: students.StudentInfo | None = None

    # -- materials ----------------------------------------------------------------------------------------------------

    def materials(self) -> Iterator[Check]:
        """As of all runs, and the files of prompts."""
        yield from super().materials()
        for file in self._files():
            if not Path(file).is_file():
                yield problem(f"the prompt file {file} does not exist; correct its path in `corpus`")

    def about(self, material: Material, place: Path) -> str:
        """The shape of a student."""
        if material.role != "student":
            return ""
        self.student = info = students.inspect(place)
        return f" ({info.architecture}, {info.layers} layers of {info.hidden})"

    def _files(self) -> list[str]:
        """Prompt files that the settings name."""
        options = self.settings.corpus
        return [*options.files, *filter(None, [options.train_file, options.val_file])]

    def _load(self, device: torch.device) -> None:
        """The teacher by its headers, if it is here."""
        shape = self.settings.adapter
        if self.settings.precompute.teacher == "synthetic":
            if self.pack.vision_dim:
                return  # it has no weights to speak of
            self.teacher = Synthetic(shape.vocabulary, shape.teacher_dim, shape.queries)
        elif path := self.places.get("teacher"):
            dtype = devices.dtype(self.settings.precompute.teacher_dtype, device)
            self.teacher = teachers.load(self.pack.teacher, path, dtype)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> Iterator[Check]:
        """The largest part of the teacher and the student, then the adapter and its batches."""
        options = self.settings.precompute
        device = devices.pick(options.device)
        self._load(device)
        yield self._precompute_memory(device, devices.budget(device, options.gpu_gib, options.ram_gib, self.granted))
        device = devices.pick(self.settings.train.device)
        yield self._training_memory(device, devices.budget(device, 0, 0, 1 << 62))

    def _precompute_memory(self, device: torch.device, budget: devices.Budget) -> Check:
        on_cpu = device.type == "cpu"
        wider = devices.dtype(self.settings.precompute.teacher_dtype, device).itemsize / 2
        sizes = [part.bytes for part in self.teacher.parts] if self.teacher else []
        gigabytes = sum(material.gigabytes for material in self.pack.materials if material.role == "teacher")
        largest = max(sizes) if sizes else int(self.pack.work.teacher_part * wider * GB)
        whole = sum(sizes) if sizes else int(gigabytes * wider * GB)
        room = int(WEIGHTS * budget.device)
        student = file = int(
            GB * sum(material.gigabytes for material in self.pack.materials if material.role == "student")
        )
        if self.student:
            file = self.student.path.stat().st_size
            each = devices.dtype(self.settings.precompute.student_dtype, device).itemsize
            student = each * sum(int(tensor.n_elements) for tensor in self.student.tensors.values())
        title = f"precompute on {device}: of {gb(budget.device)} memory, {gb(room)} are for weights"
        more = "precompute.ram_gib" if on_cpu else "precompute.gpu_gib"
        if max(largest, student) > room:
            what = "the largest part of the teacher" if largest >= student else "the student"
            change = "free memory" if on_cpu else "free GPU memory, or set precompute: {device: cpu}"
            return problem(f"{title}, and {what} takes {gb(max(largest, student))}; {change}, or raise {more}")
        pinned = 1 << largest.bit_length()  # what torch takes of main memory to copy a part from
        if not on_cpu and pinned > WEIGHTS * budget.ram:
            least = f"{gb(pinned / WEIGHTS)} of main memory are needed to copy a part of the teacher"
            return problem(f"{title}, but {least}, not {gb(budget.ram)}; free some, or raise precompute.ram_gib")
        if on_cpu:
            sizes = {"teacher": whole / GB, "largest": largest / GB, "student": student / GB, "file": file / GB}
            taken, free = GB * precompute_memory(self.settings, budget.ram / GB, **sizes), devices.free_ram()
            title = f"{title}; a job takes {gb(taken)} of {gb(free)} that are free"
            if taken > free:
                return problem(f"{title}: free some, or lower precompute.ram_gib, shard_size or block_shards")
        if whole > room:
            faster = f"it is read once a block; {gb(whole / WEIGHTS / 0.9)} free would hold it"
            return note(f"{title}, and the teacher of {gb(whole)} is streamed through them: {faster}")
        return ok(f"{title}, and the teacher's {gb(whole)} fit")

    def _training_memory(self, device: torch.device, budget: devices.Budget) -> Check:
        needed = self.estimate.training
        if device.type == "cpu":
            title = f"training on {device}: {gb(needed.cpu * GB)} of {gb(budget.ram)} main memory"
            if needed.cpu_least * GB > budget.ram:
                least = f"{gb(needed.cpu_least * GB)} of them do not depend on the batch"
                return problem(f"{title}, and {least}; free memory, or lower train.shuffle_mb, adapter.width or depth")
            if needed.cpu * GB > budget.ram:
                return problem(f"{title}; free some, or have batches computed in parts: set train.batch_tokens")
            return ok(title)
        main = f"{gb(needed.beside * GB)} of {gb(budget.ram)} main memory"
        title = f"training on {device}: {gb(needed.gpu * GB)} of {gb(budget.device)} GPU memory, {main}"
        fixed = needed.gpu - needed.step + needed.least
        if fixed * GB > budget.device:
            least = f"weights and optimizer alone take {gb(fixed * GB)}"
            return problem(f"{title}, and {least}; free memory, set train.device, or lower adapter.width or depth")
        if needed.beside * GB > budget.ram:
            return problem(f"{title}; free some main memory, or lower train.shuffle_mb")
        if needed.gpu * GB > budget.device:
            return note(f"{title}: batches are computed in parts; train.batch_tokens sets their size")
        return ok(title)

    def measured(self) -> tuple[Estimate, str]:
        """Estimates from prompts that are tokenized here, or from the pack's averages where that cannot be."""
        if self.pack.vision_dim:
            return estimate(self.settings, ANY), "for samples of average length"
        texts, samples = self._prompts()
        models = materials.ids(self.settings, role=("teacher", "student", "tokenizer"))
        if not (texts and self.teacher and self.student and all(map(self.places.get, models))):
            return estimate(self.settings, ANY, samples), "for prompts of average length"
        others = [text for _, text in probe.prompts()]
        share = len(others) / (samples or self.estimate.samples)
        size = (1 - share) * self._sample_bytes(texts) + share * self._sample_bytes(others)
        return estimate(self.settings, ANY, samples, size), f"from {len(texts):,} of the prompts"

    def _sample_bytes(self, texts: list[str]) -> float:
        """Bytes of an average sample of these texts in a shard."""
        shape, template = self.settings.adapter, self.pack.template
        tokenizer = tokenization.student_tokenizer(self.student.path, self.places.get("tokenizer"))
        prompted = ["".join(template.around(text)) for text in texts]
        rows = [self.teacher.rows or len(ids) for ids in self.teacher.tokenize(prompted, shape.queries)]
        read = [len(ids) for ids in tokenizer.encode(texts, template)]
        # A slot is an int32 beside its row; a sample has two offsets and an id of 16 digits.
        of_row = 2 * shape.teacher_dim + (4 if shape.vocabulary else 0)
        return (of_row * sum(rows) + 2 * shape.student_dim * sum(read)) / len(texts) + 36

    def _prompts(self) -> tuple[list[str], float | None]:
        """Some prompts as the run will have them, and how many samples there are at most, if that is known."""
        made = {split: self.folder / "corpus" / f"{split}.jsonl" for split in self.pack.splits}
        if all(file.exists() for file in made.values()):  # in order of hashes, so that the first are as good as any
            texts = [sample.text for sample in islice(corpus_files.read(made["train"]), _SAMPLED)]
            return texts, sum(1 for file in made.values() for _ in corpus_files.read(file))
        options = self.settings.corpus
        texts, whole = [], True
        for rows in self._sources():
            read = [row for row in islice(rows, _READ) if row is not None]
            whole = whole and len(read) < _READ
            texts += read
        known = all(self.places.get(f"prompts-{preset}") for preset in options.presets if preset != "demo")
        clean = for_engine if options.clean == "engine" and not options.train_file else collapse
        texts = [text for text in map(clean, texts) if options.min_chars <= len(text) <= options.max_chars]
        picked = random.Random(options.seed).sample(texts, min(_SAMPLED, len(texts)))
        picked += [""] * round(options.empty_fraction * len(picked))
        if not (whole and known and texts):
            return picked, None
        share, wanted = options.val_fraction, (options.n_train, options.n_val)
        probes = self.settings.samples("probe")
        if options.train_file:
            return picked, len(texts) + probes
        count = sum(min(n, part * len(texts)) for n, part in zip(wanted, (1 - share, share), strict=True))
        return picked, count * (1 + options.empty_fraction) + probes

    def _sources(self) -> Iterator[Iterator[str | None]]:
        """The texts of every source that is here."""
        options = self.settings.corpus
        if "demo" in options.presets:
            yield iter(demo_prompts.prompts(min(_READ - 1, corpus.demo_count(options)), options.seed))
        prompts = [self.places.get(f"prompts-{preset}") for preset in options.presets]
        for file in [*filter(None, prompts), *(file for file in self._files() if Path(file).is_file())]:
            yield (row.text for row in prompt_sources.read(file))
