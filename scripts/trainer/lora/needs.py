"""What LoRAs need of a machine, besides what all runs do: see `trainer.doctor`."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer import devices, picture_sources
from trainer.doctor import ANY, Check, Doctor, gb, note, ok, problem
from trainer.estimates import GB, Estimate, Training, estimate
from trainer.lora import bases, captions, families
from trainer.packs.base import Material

_PACKAGES = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}


class LoraDoctor(Doctor):
    """Checks of a run that trains a LoRA."""

    def software(self) -> Iterator[Check]:
        """As of all runs, and the packages that only LoRAs take."""
        yield from super().software()
        wanted = ["diffusers", "peft", *filter(None, [_PACKAGES.get(self.settings.lora.optimizer)])]
        if self.settings.lora.base_precision == "nf4":
            wanted.append("bitsandbytes")
        if missing := sorted({name for name in wanted if not importlib.util.find_spec(name)}):
            yield problem(f"packages that LoRAs take are missing: run `pip install {' '.join(missing)}` here")

    def materials(self) -> Iterator[Check]:
        """As of all runs, and the folders of pictures."""
        yield from super().materials()
        for name in ("folder", "regularization"):
            if folder := getattr(self.settings.pictures, name):
                setting = f"pictures.{name}"
                found = captions.discover(
                    folder, setting, self.settings.pictures.caption_column, self.settings.pictures.instance_prompt
                )
                bare = sum(it.text is None for it in found.pictures)
                about = f"{setting}: {len(found.pictures)} pictures in {folder}, {bare} without a caption"
                stops = bare and self.settings.pictures.uncaptioned == "error"
                if not found.pictures or stops or found.faults:
                    more = f"; {found.faults[0]}" if found.faults else ""
                    yield problem(f"{about}{more}")
                else:
                    yield ok(about)

    def about(self, material: Material, place: Path) -> str:
        """That a base is of a kind that is hard to train."""
        return (
            "".join(f"; {it}" for it in bases.warnings(str(place), families.get(self.pack.family)))
            if material.role == "base"
            else ""
        )

    def memory(self) -> Iterator[Check]:
        """The text encoders alone, then the base with what is trained."""
        options, needed = self.settings.precompute, estimate(self.settings, ANY)
        device = devices.pick(options.device)
        budget = devices.budget(device, options.gpu_gib, options.ram_gib, self.granted).device
        wider = devices.dtype(options.teacher_dtype, device).itemsize / 2
        title = f"precompute on {device}: {gb(needed.resident * wider * GB)} of {gb(budget)} memory"
        if needed.resident * wider * GB > budget:
            yield problem(f"{title} for the text encoders or the VAE; free some, or set precompute: {{device: cpu}}")
        else:
            yield ok(title)
        device = devices.pick(self.settings.train.device)
        budget = devices.budget(device, 0, 0, 1 << 62).device
        yield self._training(device, budget, needed.training)

    def _training(self, device: torch.device, budget: int, needed: Training) -> Check:
        lora, on_gpu = self.settings.lora, device.type == "cuda"
        wider = 2 if lora.base_precision == "auto" else 1  # f32 on a CPU
        taken = needed.gpu if on_gpu else wider * needed.cpu
        title = f"training on {device}: {gb(taken * GB)} of {gb(budget)} memory"
        if taken * GB <= budget:
            return ok(title)
        least = needed.gpu - needed.step + needed.least
        if on_gpu and least * GB <= budget and not lora.offload:
            how = f"the base is kept in 4 bits then ({gb(least * GB)} and more)"
            return note(f"{title}: {how}, or its blocks are in main memory with lora.offload")
        change = "set lora.offload, lora.base_precision nf4 or another train.device" if on_gpu else "take a GPU"
        return problem(f"{title}; lower pictures.resolution or train.batch_size, {change}")

    def measured(self) -> tuple[Estimate, str]:
        """From the number of pictures that are there."""
        folder = self.settings.pictures.folder
        count = picture_sources.count(folder) if folder else self.pack.pictures
        return estimate(self.settings, ANY), f"for {count} pictures"
