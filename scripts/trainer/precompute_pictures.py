"""A block of shards of a pack whose samples may have pictures.

The teacher's tower goes through all pictures of the block, at the sizes that its samples show them; then the student,
in which the tower's rows take the place of embeddings, and the teacher's text stack read the samples. Both read the
same tokens. Pictures are decoded when they are wanted: all at once would be far larger than what is made of them.

The sizes of pictures come from the headers of their files, before any model is loaded; a sample with a picture that has
no such header is skipped. One that turns out to be damaged further in gives rows that are no numbers, and so do, in the
end, its samples, which are skipped too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer import checkpoints, pictures, reference_areas, reference_images, shards, students, teachers
from trainer.chat_templates import Chat, Prompt
from trainer.config import Settings
from trainer.control import Requests
from trainer.corpus_files import Sample
from trainer.errors import TrainerError
from trainer.files import digest
from trainer.job import log
from trainer.materials import Record
from trainer.passes import Item, Pass, RowsPass
from trainer.precompute import Block, Collected, Stale, Step
from trainer.reference_images import PATCH, SLOT, Size
from trainer.streaming import Part, State
from trainer.teachers.qwen3_vl import spliced
from trainer.teachers.synthetic import SyntheticPictures

_UNREADABLE = "a picture that cannot be read"


@dataclass(frozen=True)
class View:
    """A picture, by the name of its file, at the size that the tower sees."""

    name: str
    size: Size

    @property
    def id(self) -> str:
        """It among the pictures of a shard."""
        return f"{self.name} {self.size[0]}x{self.size[1]}"

    @property
    def slots(self) -> tuple[int, int]:
        """Rows and columns of tokens that stand for it."""
        return self.size[0] // SLOT, self.size[1] // SLOT

    @property
    def patches(self) -> int:
        """What the tower reads."""
        return (self.size[0] // PATCH) * (self.size[1] // PATCH)


@dataclass(frozen=True)
class Encoded:
    """A sample as the models read it.

    shard: the number of its shard among those that are made.
    supervised: which of its rows the adapter is to learn, bool [P].
    """

    sample: Sample
    shard: int
    prompt: Prompt
    views: tuple[View, ...]
    supervised: Tensor


class PictureBlock(Block):
    """The shards of one job and the models that fill them."""

    def __init__(
        self, settings: Settings, records: dict[str, Record], requests: Requests, granted: int, vision_proj: Path
    ) -> None:
        """As of `Block`; `vision_proj` is the file of the rule of that name."""
        super().__init__(settings, records, requests, granted)
        self.contract = teachers.contract(self.pack.teacher)
        self.vision_proj = vision_proj
        self.dims = (*self.dims, settings.adapter.vision_dim)
        self.made_from |= {
            "vision_dim": settings.adapter.vision_dim,
            "vision_proj": digest(checkpoints.read_meta(vision_proj)),
        }
        if self.contract.areas:
            areas = [list(area) for area in self.options.reference_areas]
            self.made_from |= {"reference_areas": areas, "two_image_max_area": self.options.two_image_max_area}
        self._size = cache(lambda name: pictures.size(self.folder / name))

    def _student(self, info: students.StudentInfo) -> students.Student:
        student = super()._student(info)
        student.vision_proj = checkpoints.load(self.vision_proj)[0]["weight"].to(self.device)
        return student

    def _load_teacher(self) -> None:
        super()._load_teacher()
        place = self.records["tokenizer" if "tokenizer" in self.records else "student"].path
        self.chat = Chat(self.contract.template, self.tokenizer.backend, place)
        if self.options.teacher == "real":
            teachers.check_vocabulary(Path(self.records["teacher"].path), self.tokenizer.size, self.teacher.ids)

    def _synthetic(self) -> SyntheticPictures:
        shape = self.settings.adapter
        return SyntheticPictures(shape.teacher_dim, shape.vision_dim, self.contract)

    def _sizes(self) -> dict[str, tuple[int | None, int | None]]:
        return super()._sizes() | {
            "size of pictures' rows": (self.teacher.vision_dim, self.settings.adapter.vision_dim)
        }

    def _why_stale(self, file: Path, inputs: str) -> str | None:
        """Also where pictures could not be read: they may be there again."""
        if reason := super()._why_stale(file, inputs):
            return reason
        unread = any(item["reason"] == _UNREADABLE for item in shards.Shard(file).header["skipped"])
        return "pictures of it could not be read" if unread else None

    def _remedy(self) -> str:
        areas = ", lower precompute.reference_areas" if self.contract.areas else ""
        return f"look at the prompts{areas}, delete {self.folder.parent} if pictures are gone, to have them read again"

    def _encode(self, shard: Stale, number: int) -> None:
        samples, views = [], []
        for sample in shard.samples:
            area = reference_areas.draw(
                sample.images, sample.text, self.options.reference_areas, self.options.two_image_max_area
            )
            try:
                sizes = [self.contract.size(*self._size(name), area) for name in sample.images]
            except TrainerError as error:
                log.info("%s", error)
                shard.skipped.append((sample.id, _UNREADABLE))
            else:
                samples.append(sample)
                views.append(tuple(map(View, sample.images, sizes)))
        prompts = self.chat.prompts([it.text for it in samples], [[view.slots for view in own] for own in views])
        for sample, prompt, own in zip(samples, prompts, views, strict=True):
            supervised = torch.from_numpy(self.chat.supervised(prompt))
            self._add(shard, sample, Encoded(sample, number, prompt, own, supervised), len(prompt.ids))

    def _steps(self, student: Callable[[], list[Part]], stale: list[Stale], partial: Path) -> list[Step]:
        inputs = self._inputs(stale)
        views = [{view.id: view for it in shard.encoded for view in it.views} for shard in stale]
        items = [[Item(id, view.patches, view) for id, view in own.items()] for own in views]
        tower = Pass("tower", items, inputs, self.tokens, partial / "tower", self._seen)

        def made_of(batch: list[Encoded], names: Any) -> list[list[State]]:
            """What the tower made of each sample's pictures."""
            return [[tower.of(it.shard, view.id, names) for view in it.views] for it in batch]

        def for_student(batch: list[Encoded]) -> State:
            prompts, widths = [it.prompt for it in batch], {"vision": self.teacher.vision_dim}
            return spliced(prompts, made_of(batch, widths), widths, self.teacher.dtype)

        def for_teacher(batch: list[Encoded]) -> State:
            return self.teacher.batch([it.prompt for it in batch], made_of(batch, self.teacher.widths))

        def samples(name: str, make: Callable[[list[Encoded]], State], wanted: Callable[[Encoded], Tensor]) -> RowsPass:
            items = [
                [Item(it.sample.id, len(it.prompt.ids), it, wanted(it)) for it in shard.encoded] for shard in stale
            ]
            return RowsPass(name, items, inputs, self.tokens, partial / name, make)

        read = samples("student", for_student, lambda it: torch.ones(len(it.prompt.ids), dtype=torch.bool))
        taught = samples("teacher", for_teacher, lambda it: it.supervised)
        return [
            Step(tower, lambda: self.teacher.vision_parts, self.teacher.weights),
            Step(read, student, None),
            Step(taught, lambda: self.teacher.parts, self.teacher.weights),
        ]

    def _seen(self, views: list[View]) -> State:
        """A batch of pictures as the tower's first part reads it."""
        grid = torch.tensor([view.size for view in views]) // PATCH
        return {"patches": torch.stack([self._patches(view) for view in views]), "grid": grid}

    def _patches(self, view: View) -> Tensor:
        try:
            image = np.asarray(pictures.open_rgb(self.folder / view.name))
        except TrainerError as error:
            log.warning("%s", error)
            return torch.full((view.patches, reference_images.ROW), torch.nan, dtype=self.teacher.dtype)
        return torch.from_numpy(reference_images.patches(self.contract.pixels(image, view.size))).to(self.teacher.dtype)

    def _collect(self, shard: Stale, number: int, passes: list[Pass]) -> Collected:
        tower, student, teacher = passes
        (states, student_moments), (rows, moments) = student.take(number), teacher.take(number)
        kept = []
        for it in shard.encoded:
            parts = [tower.of(number, view.id, ("vision",))["vision"].bfloat16() for view in it.views]
            vision = torch.cat([torch.empty(0, self.teacher.vision_dim, dtype=torch.bfloat16), *parts])
            state, target = states[it.sample.id], rows[it.sample.id]
            if not torch.isfinite(vision).all():
                shard.skipped.append((it.sample.id, _UNREADABLE))
            elif state is None or target is None:
                shard.skipped.append((it.sample.id, "non-finite rows"))
            else:
                positions = [it.prompt.under_pictures.tolist(), it.supervised.nonzero()[:, 0].tolist()]
                kept.append(shards.Rows(it.sample.id, [], state, target, vision, *positions, it.prompt.start))
        tower.drop(number)
        return kept, (student_moments, moments)
