"""What a run with given settings needs, and whether this machine has it: a line a check.

Nothing of the run is computed, downloaded or changed, and models are looked at by their headers.
"""

import math
import os
import platform
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import psutil
import torch

from trainer import (
    corpus,
    corpus_files,
    demo_prompts,
    devices,
    finding,
    hub,
    materials,
    packs,
    probe,
    processes,
    prompt_sources,
    status,
    students,
    teachers,
    tokenization,
)
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.estimates import GB, WEIGHTS, Estimate, Machine, estimate, precompute_memory
from trainer.packs.base import Material
from trainer.prompt_cleaning import collapse, for_engine
from trainer.teachers.synthetic import Synthetic

_SAMPLED = 2000  # prompts that are tokenized
_READ = 200_000  # prompts that are read of a file
_ANY = Machine("any", 1, 1)  # where no time is wanted


@dataclass(frozen=True)
class Check:
    """What was found: `ok`, a `note` (the run will do, but know this), or a `PROBLEM` with what to change."""

    level: Literal["ok", "note", "PROBLEM"]
    text: str


def _ok(text: str) -> Check:
    return Check("ok", text)


def _note(text: str) -> Check:
    return Check("note", text)


def _problem(text: str) -> Check:
    return Check("PROBLEM", text)


def tell(found: Iterable[Check]) -> None:
    """Print checks as they are made.

    Raises:
        TrainerError: there are problems.
    """
    problems = 0
    for check in found:
        print(f"{check.level:7}  {check.text}", flush=True)
        problems += check.level == "PROBLEM"
    if problems:
        raise TrainerError(f"{problems} of the lines above say PROBLEM, and what to change")


def checks(settings: Settings, granted: int) -> Iterator[Check]:
    """All checks; `granted` is how many bytes of main memory a block of shards may use."""
    doctor, told = _Doctor(settings, granted), set()
    for look in (doctor.software, doctor.hardware, doctor.materials, doctor.memory, doctor.disk, doctor.hours):
        try:
            yield from look()
        except TrainerError as error:
            if str(error) not in told:  # a device that does not exist is met twice
                yield _problem(str(error))
            told.add(str(error))


class _Doctor:
    def __init__(self, settings: Settings, granted: int) -> None:
        self.settings, self.granted, self.pack = settings, granted, packs.get(settings.pack)
        self.folder = Path(settings.folder)
        self.places: dict[str, Path | None] = {}
        self.teacher: teachers.Teacher | None = None
        self.student: students.StudentInfo | None = None
        self.estimate = estimate(settings, _ANY)

    # -- the machine --------------------------------------------------------------------------------------------------

    def software(self) -> Iterator[Check]:
        torch_ = f"torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else "")
        driver = _driver()
        versions = f"Python {platform.python_version()}, {torch_}" + (f", NVIDIA driver {driver}" if driver else "")
        wanted = {self.settings.precompute.device, self.settings.train.device} != {"cpu"}
        if driver and wanted and not torch.cuda.is_available():
            yield _problem(f"{versions}: torch cannot use the GPU; install one built for CUDA and this driver")
        else:
            yield _ok(versions)

    def hardware(self) -> Iterator[Check]:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield _ok(f"cuda:{index} {name}: {_gb(free)} of {_gb(total)} GPU memory free")
        memory = psutil.virtual_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield _ok(f"{cores} CPU cores, {_gb(memory.available)} of {_gb(memory.total)} main memory free")
        if self.settings.train.processes > 1:
            processes.check(self.settings.train)

    # -- models and prompts -------------------------------------------------------------------------------------------

    def materials(self) -> Iterator[Check]:
        companion = materials.ids(self.settings, role="companion") if self.settings.companion else []
        for id in [*materials.ids(self.settings), *companion]:
            yield self._material(materials.get(self.settings, id))
        for file in self._files():
            if not Path(file).is_file():
                yield _problem(f"the prompt file {file} does not exist; correct its path in `corpus`")

    def _material(self, material: Material) -> Check:
        place, refused = finding.locate(self.settings, material.id)
        self.places[material.id] = place
        passed_over = f"; passed over: {refused}" if refused else ""
        if place and material.role == "student":
            self.student = info = students.inspect(place)
            shape = f"{info.architecture}, {info.layers} layers of {info.hidden}"
            return _ok(f"{material.id}: {place} ({shape}){passed_over}")
        if place:
            return _ok(f"{material.id}: {place}{passed_over}")
        if material.id in self.settings.materials.paths:
            return _problem(f"{material.id}: materials.paths.{material.id} cannot be used: {refused}")
        if material.kind == "package":
            how = f"run `pip install --force-reinstall {material.package}` in this environment"
            return _problem(f"{material.id}: the package {material.package} is missing or not whole; {how}")
        if material.kind == "file":
            return _problem(f"{material.id}: {material.title} is missing; {material.how_to_get}{passed_over}")
        revision = self.settings.materials.revisions.get(material.id, material.revision)
        size = f"{material.gigabytes:g} GB of {material.repository}"
        if hub.offline():
            how = hub.how_to_get(material, revision)
            return _problem(f"{material.id}: {size} are missing and HF_HUB_OFFLINE is set; {how}{passed_over}")
        try:
            hub.reach(material, revision)
        except TrainerError as error:
            how = hub.how_to_get(material, revision)
            return _problem(f"{material.id}: {size} are missing and cannot be downloaded: {error}; or {how}")
        return _note(f"{material.id}: {size} will be downloaded{passed_over}")

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
        title = f"precompute on {device}: of {_gb(budget.device)} memory, {_gb(room)} are for weights"
        more = "precompute.ram_gib" if on_cpu else "precompute.gpu_gib"
        if max(largest, student) > room:
            what = "the largest part of the teacher" if largest >= student else "the student"
            change = "free memory" if on_cpu else "free GPU memory, or set precompute: {device: cpu}"
            return _problem(f"{title}, and {what} takes {_gb(max(largest, student))}; {change}, or raise {more}")
        pinned = 1 << largest.bit_length()  # what torch takes of main memory to copy a part from
        if not on_cpu and pinned > WEIGHTS * budget.ram:
            least = f"{_gb(pinned / WEIGHTS)} of main memory are needed to copy a part of the teacher"
            return _problem(f"{title}, but {least}, not {_gb(budget.ram)}; free some, or raise precompute.ram_gib")
        if on_cpu:
            sizes = {"teacher": whole / GB, "largest": largest / GB, "student": student / GB, "file": file / GB}
            taken, free = GB * precompute_memory(self.settings, budget.ram / GB, **sizes), devices.free_ram()
            title = f"{title}; a job takes {_gb(taken)} of {_gb(free)} that are free"
            if taken > free:
                return _problem(f"{title}: free some, or lower precompute.ram_gib, shard_size or block_shards")
        if whole > room:
            faster = f"it is read once a block; {_gb(whole / WEIGHTS / 0.9)} free would hold it"
            return _note(f"{title}, and the teacher of {_gb(whole)} is streamed through them: {faster}")
        return _ok(f"{title}, and the teacher's {_gb(whole)} fit")

    def _training_memory(self, device: torch.device, budget: devices.Budget) -> Check:
        needed = self.estimate.training
        if device.type == "cpu":
            title = f"training on {device}: {_gb(needed.cpu * GB)} of {_gb(budget.ram)} main memory"
            if needed.cpu_least * GB > budget.ram:
                least = f"{_gb(needed.cpu_least * GB)} of them do not depend on the batch"
                return _problem(f"{title}, and {least}; free memory, or lower train.shuffle_mb, adapter.width or depth")
            if needed.cpu * GB > budget.ram:
                return _problem(f"{title}; free some, or have batches computed in parts: set train.batch_tokens")
            return _ok(title)
        main = f"{_gb(needed.beside * GB)} of {_gb(budget.ram)} main memory"
        title = f"training on {device}: {_gb(needed.gpu * GB)} of {_gb(budget.device)} GPU memory, {main}"
        fixed = needed.gpu - needed.step + needed.least
        if fixed * GB > budget.device:
            least = f"weights and optimizer alone take {_gb(fixed * GB)}"
            return _problem(f"{title}, and {least}; free memory, set train.device, or lower adapter.width or depth")
        if needed.beside * GB > budget.ram:
            return _problem(f"{title}; free some main memory, or lower train.shuffle_mb")
        if needed.gpu * GB > budget.device:
            return _note(f"{title}: batches are computed in parts; train.batch_tokens sets their size")
        return _ok(title)

    # -- disk ---------------------------------------------------------------------------------------------------------

    def disk(self) -> Iterator[Check]:
        self.estimate, how = self._measured()
        stages = {stage["name"]: stage for stage in status.read(self.folder)["stages"]}
        left = {name: self._left(stages[name]) for name in ("precompute", "train", "export")}
        missing = [materials.get(self.settings, id) for id, place in self.places.items() if not place]
        download = GB * sum(material.gigabytes for material in missing if material.repository)
        # Prompts are written anew into the run.
        left["materials"] = GB * sum(material.gigabytes for material in missing if material.kind == "prompts")
        spare = GB * (self.estimate.disk - sum(self.estimate.stages.values())) if left["train"] else 0
        needs = [
            (self.folder, sum(left.values()) - left["export"] + spare, "runs_dir"),
            (Path(self.settings.export.dir), left["export"], "export.dir"),
        ]
        if self.settings.export.copy_to:
            needs.append((Path(self.settings.export.copy_to), left["export"], "export.copy_to"))
        if download:
            needs.append((hub.cache_folder(), download, "HF_HOME"))
        disks = defaultdict(list)
        for path, size, setting in needs:
            there = next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.exists())
            if not os.access(there, os.W_OK):
                yield _problem(f"{there} cannot be written to; change its permissions or set {setting}")
            disks[there.stat().st_dev].append((path, size, setting, there))
        for parts in disks.values():
            yield self._disk(parts, how)

    def _left(self, stage: status.Values) -> float:
        """Bytes that a stage has yet to write."""
        if not stage["needed_bytes"] or (stage["name"] == "precompute" and stage["done"]):
            return stage["needed_bytes"] or 0  # the shards that are there tell most
        return max(0.0, GB * self.estimate.stages[stage["name"]] - stage["used_bytes"])

    def _disk(self, parts: list[tuple[Path, float, str, Path]], how: str) -> Check:
        needed, free = sum(size for _, size, _, _ in parts), shutil.disk_usage(parts[0][3]).free
        what = ", ".join(f"{path} {_gb(size)}" for path, size, _, _ in parts)
        title = f"disk: {_gb(needed)} more needed ({what}; {how}), {_gb(free)} free"
        if needed > free:
            others = " or ".join(setting for _, size, setting, _ in parts if size)
            return _problem(f"{title}: free {_gb(needed - free)}, or set {others} to a folder on another disk")
        return _note(f"{title}: little more than that") if needed > 0.9 * free else _ok(title)

    def _measured(self) -> tuple[Estimate, str]:
        """Estimates from prompts that are tokenized here, or from the pack's averages where that cannot be."""
        if self.pack.vision_dim:
            return estimate(self.settings, _ANY), "for samples of average length"
        texts, samples = self._prompts()
        models = materials.ids(self.settings, role=("teacher", "student", "tokenizer"))
        if not (texts and self.teacher and self.student and all(map(self.places.get, models))):
            return estimate(self.settings, _ANY, samples), "for prompts of average length"
        others = [text for _, text in probe.prompts()]
        share = len(others) / (samples or self.estimate.samples)
        size = (1 - share) * self._sample_bytes(texts) + share * self._sample_bytes(others)
        return estimate(self.settings, _ANY, samples, size), f"from {len(texts):,} of the prompts"

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
        made = {split: self.folder / "corpus" / f"{split}.jsonl" for split in corpus_files.SPLITS}
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

    # -- time ---------------------------------------------------------------------------------------------------------

    def hours(self) -> Iterator[Check]:
        stages = {stage["name"]: stage for stage in status.read(self.folder)["stages"]}
        files = [file for place in self.places.values() if place for file in _all_files(place)]
        disk = _disk_rate(max(files, key=lambda file: file.stat().st_size)) if files else None
        rates = [f"{disk:.1f} GB/s from the disk" if disk else "a disk that does not slow it down"]
        hours, speed = {}, {}
        for name, group in (("precompute", self.settings.precompute), ("train", self.settings.train)):
            device = devices.pick(group.device)
            tflops = speed[device] = speed.get(device) or _rate(device)
            made = estimate(self.settings, Machine("this", tflops, disk or math.inf), self.estimate.samples)
            whole = made.precompute_hours if name == "precompute" else made.training_hours
            stage = stages[name]
            left = 0.0 if stage["state"] == "done" else 1 - min(1.0, stage["done"] / (stage["total"] or 1))
            hours[name] = _hours(whole * left)
        rates += [f"{tflops:.3g} Tflop/s on {device}" for device, tflops in speed.items()]
        measured = ", ".join(rates)
        yield _ok(f"time left: precompute {hours['precompute']}, training {hours['train']} ({measured})")


def _driver() -> str | None:
    """The version of NVIDIA's driver, if there is one."""
    try:
        found = re.search(r"  (\d+\.[\d.]+)  ", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else "of an unknown version"
    except OSError:
        return None


def _rate(device: torch.device, seconds: float = 0.4) -> float:
    """Operations that matrix products reach on a device, in 10^12 a second."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=devices.dtype("auto", device), device=device) for _ in range(2))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    a @ b
    synchronize()
    count, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        a @ b
        synchronize()
        count += 1
    return 2 * size**3 * count / (time.monotonic() - start) / 1e12


def _disk_rate(file: Path, size: int = 1 << 28, seconds: float = 0.5) -> float | None:
    """GB a second that a file is read with, past the system's cache; None for one too small to tell."""
    if file.stat().st_size < 1 << 26 or not hasattr(os, "posix_fadvise"):
        return None
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
        done, start = 0, time.monotonic()
        while done < size and time.monotonic() - start < seconds and (piece := os.read(handle, 1 << 24)):
            done += len(piece)
        return done / GB / max(time.monotonic() - start, 1e-9)
    finally:
        os.close(handle)


def _all_files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]


def _gb(count: float) -> str:
    return f"{count / GB:.3g} GB"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{math.ceil(hours * 60)} min"
    return f"{hours:.2g} h" if hours < 48 else f"{hours / 24:.2g} days"
