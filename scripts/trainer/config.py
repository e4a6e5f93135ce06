"""Every setting: its type, its default, what it does, and whether a change of it makes computed things stale.

`config.yaml` and `config.schema.json` are written from here (`python scripts/write_config.py`). Precedence:
config.yaml < packs/<pack>/pack.yaml < the user's own file < --config. Snakemake merges them; `load` checks the result.
"""

import difflib
from collections.abc import Container, Iterable
from math import ceil
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from trainer import aliases, packs, picture_sources, probe, shard_index
from trainer.corpus_files import Split
from trainer.errors import TrainerError
from trainer.files import digest, write_if_changed
from trainer.lora import bases, captions, families
from trainer.packs.base import AdapterPack, Kind, LoraPack

Preset = Literal["demo", "gustavosta", "midjourney", "diffusiondb", "vidprom"]
ImagePreset = Literal["flickr30k", "coco_captions"]
MIN_HELD_OUT = 10  # pictures; of fewer, none is held out
_SEEDS = 2**63 - 1


def live(default: Any, description: str, of: Kind | None = None, **constraints: Any) -> Any:
    """A field that may change at any time: nothing that was computed depends on it."""
    extra: dict[str, Any] = {"live": True} | ({"of": of} if of else {})
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def fixed(default: Any, description: str, of: Kind | None = None, **constraints: Any) -> Any:
    """A field that results depend on: when it changes, its stage and all below are redone.

    `of`: the kind of packs that it is for, if not for all; nothing of other packs depends on it, and they refuse it.
    """
    extra: dict[str, Any] | None = {"of": of} if of else None
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class Group(BaseModel):
    """One group of settings. Snakemake hands values of --config as strings: they are coerced.

    of: the kind of packs that the group is for, if not for all.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True)
    of: ClassVar[Kind | None] = None

    @field_validator("*", mode="before")
    @classmethod
    def _blank(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if not _is_blank(value):
            return value
        if NoneType in get_args(field.annotation):
            return None
        if field.annotation is bool and value is not None:
            return False
        return field.default if field.annotation is str and not (value or "").strip() else value

    @classmethod
    def kind(cls, name: str) -> Kind | None:
        """The kind of packs that a field is for, if not for all that its group is for."""
        return _extra(cls.model_fields[name]).get("of")

    def fingerprint(self, kinds: Container[Kind]) -> dict[str, Any]:
        """The settings that results of a pack of these kinds depend on, as JSON-able values."""
        fields = type(self).model_fields
        others = {name for name in fields if (kind := self.kind(name)) and kind not in kinds}
        return self.model_dump(mode="json", exclude=others | {n for n, f in fields.items() if _extra(f).get("live")})


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none", "~", ""))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


class Materials(Group):
    """Models and data sets: where they are looked for before anything is downloaded."""

    search: list[str] = live(
        [], "folders to look in for materials before downloading, besides those in GGUF_TRAINER_MATERIALS"
    )
    paths: dict[str, str] = live(
        {}, "exact places, by material id, such as {student: /models/pig_clip-f16.gguf}; nothing else is tried for it"
    )
    revisions: dict[str, str] = live(
        {}, "hub commits by material id, instead of the pack's; 40 hex digits pin one exactly"
    )


class Corpus(Group):
    """The prompts, and pictures with instructions, split into train and val by a hash of what they say or show."""

    of = "adapters"

    presets: list[Preset] = fixed(
        ["demo"], "prompt sets: gustavosta, midjourney, diffusiondb, vidprom (downloaded), demo (generated)"
    )
    files: list[str] = fixed(
        [], "your own prompts: .txt (one a line), .jsonl, .csv or .parquet (column `prompt`, `text` or `caption`)"
    )
    train_file: str | None = fixed(None, "ready-made training prompts (same formats), used as they are; needs val_file")
    val_file: str | None = fixed(None, "ready-made validation prompts; needs train_file")
    n_train: int = fixed(60000, "training prompts to keep at most; it also sets the number of shards", ge=1)
    n_val: int = fixed(1024, "validation prompts to keep at most", ge=1)
    val_fraction: float = fixed(0.02, "share of all prompts whose hash makes them validation prompts", gt=0, lt=0.5)
    empty_fraction: float = fixed(0.01, "share of empty prompts added to both splits (the CFG prompt)", ge=0, lt=0.5)
    min_chars: int = fixed(8, "shorter prompts are dropped", ge=1)
    max_chars: int = fixed(1200, "longer prompts are dropped", ge=1)
    clean: Literal["engine", "none"] = fixed(
        "engine",
        "engine: remove what the engine reads as prompt-weight syntax - ( ) [ ] \\ BREAK - and fold unicode forms, so "
        "that what is trained is what the engine encodes; none: keep prompts as they are",
    )
    near_duplicates: float = fixed(
        0.8,
        "prompts that share this part (Jaccard) of their words and word pairs count as one; 1: only equal ones do",
        gt=0,
        le=1,
    )
    seed: int = fixed(8, "seed of the split, the selection and the empties", ge=0)
    image_presets: list[ImagePreset] = fixed(
        [],
        "sets of captioned pictures: flickr30k (31,000), coco_captions (113,000), both downloaded",
        of="pictures",
    )
    image_folders: list[str] = fixed(
        [],
        "folders of your own pictures, with captions, one a line, in 01.txt beside 01.jpg where there are some",
        of="pictures",
    )
    n_image: int = fixed(0, "training samples with one picture, at most", of="pictures", ge=0)
    n_two: int = fixed(0, "training samples with two pictures, at most", of="pictures", ge=0)
    n_text: int = fixed(
        0, "training samples without a picture, at most: prompts of presets and files", of="pictures", ge=0
    )
    n_val_image: int = fixed(0, "validation samples with one picture, at most", of="pictures", ge=0)
    n_val_text: int = fixed(0, "validation samples without a picture, at most", of="pictures", ge=0)
    max_bad_pictures: float = live(
        0.3,
        "broken pictures are left out, but more than this share of a source stop the run",
        of="pictures",
        ge=0,
        le=1,
    )

    @field_validator("files", "image_folders")
    @classmethod
    def _home(cls, value: list[str]) -> list[str]:
        return [str(Path(path).expanduser()) for path in value]

    @model_validator(mode="after")
    def _consistent(self) -> "Corpus":
        if (self.train_file is None) != (self.val_file is None):
            raise ValueError("train_file and val_file go together: set both or neither")
        if self.train_file and (self.presets or self.files):
            raise ValueError("train_file is used as it is: set presets and files to [], or remove train_file")
        if not (self.train_file or self.presets or self.files or self.image_presets or self.image_folders):
            raise ValueError("no prompts: set presets, files, or train_file and val_file")
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is larger than max_chars {self.max_chars}")
        return self


class Pictures(Group):
    """The pictures that a LoRA learns from, and how they are cut to what the model takes."""

    of = "LoRAs"

    folder: str | None = fixed(
        None,
        "folder of the pictures, with captions in 01.txt or 01.caption beside 01.jpg, or in metadata.jsonl; null: "
        "those that lora_demo draws",
    )
    caption_column: str = fixed("text", "key of the caption in the lines of metadata.jsonl and captions.jsonl")
    instance_prompt: str | None = fixed(None, "caption of pictures that have none, such as `a photo of sks dog`")
    uncaptioned: Literal["error", "skip", "empty"] = fixed(
        "error", "pictures without any caption: stop, leave them out (listed in corpus.json), or train them without one"
    )
    resolution: int | None = fixed(
        None, "pixels a side of a square; other shapes have about its area; null: the family's", ge=64, multiple_of=64
    )
    ratios: int = fixed(
        9, "ratios of width to height, from 1:2 to 2:1, that pictures are cropped to; odd; 1: squares", ge=1, le=33
    )
    min_side: int = fixed(256, "pictures with a shorter side are warned of", ge=1)
    crop: Literal["center", "random"] = fixed("center", "where a picture is cut to the ratio of its bucket")
    variants: int = fixed(1, "random crops of each picture", ge=1, le=16)
    flip: bool = fixed(False, "train on mirrored pictures as well; not where text, logos or faces matter")
    masks: bool = fixed(False, "take 01-mask.png beside 01.jpg as the weight of its pixels: white counts, black not")
    regularization: str | None = fixed(
        None, "folder of pictures of the class, with captions, so that the model does not forget it; null: none"
    )
    regularization_weight: float = fixed(1.0, "weight of their loss", gt=0, le=100)
    holdout: float = fixed(
        0.1,
        "share of the pictures, by a hash of what they show, that are kept for validation; of fewer than 10 none is, "
        "and the training pictures are validated on",
        ge=0,
        le=0.5,
    )
    max_bad_fraction: float = live(
        0.05,
        "broken pictures are left out (listed in corpus.json), but more than this share of a folder stop the run",
        ge=0,
        le=1,
    )
    seed: int = fixed(8, "seed of the holdout and of random crops", ge=0, le=_SEEDS)

    @field_validator("folder", "regularization")
    @classmethod
    def _home(cls, value: str | None) -> str | None:
        return value and str(Path(value).expanduser())

    @model_validator(mode="after")
    def _consistent(self) -> "Pictures":
        if self.ratios % 2 == 0:
            raise ValueError(f"ratios is {self.ratios}: it must be odd, so that squares are among them")
        if self.variants > 1 and self.crop != "random":
            raise ValueError("variants are random crops: set crop to random, or variants to 1")
        if self.regularization and self.regularization == self.folder:
            raise ValueError("regularization is the same folder as folder: its pictures would be trained on twice")
        return self


class Lora(Group):
    """The LoRA, and the base model that it is trained on."""

    of = "LoRAs"

    base: str | None = fixed(
        None,
        "the base model, as diffusers keeps it: a folder, or a repository of the hub that is trusted; null: the pack's",
    )
    trusted: list[str] = live([], "repositories of base models to trust besides the known ones, such as me/my-sdxl")
    rank: int = fixed(16, "rank of the matrices that are learnt", ge=1, le=4096)
    alpha: float | None = fixed(None, "they count alpha/rank times; null: the rank", gt=0)
    dropout: float = fixed(0.0, "share of their inputs that are left out of a step", ge=0, lt=1)
    targets: list[str] = fixed(
        [],
        "modules that get some: names or patterns, attn, or attn-mlp; []: the family's, which are those of attention",
    )
    base_precision: Literal["auto", "f32", "bf16", "f16", "nf4"] = fixed(
        "auto", "numbers of the base; auto: f32 on a CPU, bf16 on a GPU that has room for it, else nf4 (4 bits, QLoRA)"
    )
    offload: bool = live(False, "keep blocks of the base in main memory until their turn: slower, on less GPU memory")
    checkpointing: bool = live(True, "compute activations a second time instead of keeping them: slower, less memory")
    text_dropout: float | None = fixed(
        None, "share of samples that are trained with the empty caption; null: the family's", ge=0, le=1
    )
    timesteps: Literal["uniform", "logit_normal"] | None = fixed(
        None, "how timesteps are drawn; null: the family's (uniform for SDXL, else logit_normal)"
    )
    flow_shift: float | Literal["auto"] | None = fixed(
        None, "shift of the noise schedule: a number, or auto (as at inference, by size); null: the family's"
    )
    guidance: float = fixed(1.0, "guidance that FLUX is told in training", ge=0)
    snr_gamma: float | None = fixed(
        None, "weigh steps of SDXL by the smaller of their signal-to-noise ratio and this; 0: do not; null: 5", ge=0
    )
    ema: float = fixed(0.0, "decay of a running mean of the weights, which is exported; 0: none", ge=0, lt=1)
    optimizer: Literal["adamw", "adamw8bit", "prodigy"] = fixed(
        "adamw", "adamw8bit needs the package bitsandbytes, prodigy the package prodigyopt and train.lr 1"
    )

    @field_validator("base")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser().absolute()) if value and bases.is_folder(value) else value

    @field_validator("checkpointing", mode="before")
    @classmethod
    def _of_other_trainers(cls, value: Any) -> Any:
        return True if value == "unsloth" else value

    @field_validator("flow_shift", mode="before")
    @classmethod
    def _shift(cls, value: Any) -> Any:
        try:
            if _is_blank(value) or value == "auto":
                return None if _is_blank(value) else value
            if 0 < float(value) < float("inf") and not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ValueError("a number above 0, auto or null is wanted")


class Precompute(Group):
    """What training reads, written as shards: teacher rows and student states, or latents and embeddings of a LoRA."""

    teacher: Literal["real", "synthetic"] = fixed(
        "real",
        "synthetic: learnable made-up targets for a smoke run without the teacher; never a usable adapter",
        of="adapters",
    )
    device: str = live("auto", "auto (the GPU with the most free memory, else cpu), cpu, cuda, cuda:1, ...")
    shard_size: int = fixed(1024, "prompts or pictures a shard, on average", ge=1)
    block_shards: int = fixed(4, "shards a job: models are loaded once a block", ge=1, le=100)
    teacher_dtype: Literal["auto", "bf16", "f16", "f32"] = fixed(
        "auto", "auto: bf16 on a GPU or a CPU that multiplies in bf16, else f32; of a LoRA for the base's text encoders"
    )
    student_dtype: Literal["auto", "bf16", "f16", "f32"] = fixed(
        "auto", "as teacher_dtype, for the student", of="adapters"
    )
    storage: Literal["bf16", "int8"] = fixed(
        "bf16",
        "how rows are stored in shards; int8, with a scale for each row, takes half the space",
        of="adapters",
    )
    batch_tokens: int = live(
        0,
        "tokens a batch, padding included; 0: 1024 a GiB of GPU memory, 2048 on a CPU",
        of="adapters",
        ge=0,
        le=1_000_000,
    )
    gpu_gib: float = live(0, "GPU memory a job may use, in GiB; 0: nearly all that is free", ge=0)
    ram_gib: float = live(
        0, "main memory a job may use, in GiB; 0: nearly all that is free, at most the rule's mem_mb", ge=0
    )
    max_bad_fraction: float = live(
        0.05,
        "samples skipped (too long, non-finite rows) beyond this share of a block stop the run",
        of="adapters",
        ge=0,
        le=1,
    )
    reference_areas: list[tuple[PositiveInt, PositiveFloat]] = fixed(
        [[147456, 0.35], [262144, 0.35], [589824, 0.2], [1048576, 0.1]],
        "areas in pixels, each with its share of the samples, that reference pictures are scaled to where the engine "
        "scales them to the area of its output",
        of="pictures",
        min_length=1,
    )
    two_image_max_area: int = fixed(
        262144, "the largest of these areas for samples with two pictures", of="pictures", ge=1024
    )


class Adapter(Group):
    """The shape of the network that is trained."""

    of = "adapters"

    width: int = fixed(1024, "width; heads have 64 dimensions", ge=64, multiple_of=64)
    depth: int = fixed(6, "number of blocks", ge=1, le=64)
    student_dim: int | None = fixed(None, "hidden size of the student; null: what the pack's engine model needs", ge=1)
    teacher_dim: int | None = fixed(None, "size of a teacher row; null: what the pack's engine model needs", ge=1)
    queries: int | None = fixed(
        None, "query slots; null: what the pack's engine model needs, or none for a pack with a row a token", ge=1
    )
    vocabulary: int | None = fixed(
        None, "rows of the seed table; null: the pack's teacher vocabulary, or no table for a pack that has none", ge=1
    )
    vision_dim: int | None = fixed(
        None,
        "size of a row of the vision tower; null: the pack's, or none for a pack without pictures",
        of="pictures",
        ge=1,
    )


class Train(Group):
    """The training. `steps` can change at any time, also while training runs."""

    steps: int = live(20000, "planned optimizer steps; re-read from your files while training runs", ge=1)
    batch_size: int = fixed(32, "prompts or pictures a step", ge=1)
    batch_tokens: int = live(
        0,
        "rows (student's and teacher's) or, of a LoRA, places of latents a forward pass; gradients add up exactly to "
        "the batch's; 0: all of them",
        ge=0,
    )
    processes: int = live(1, "processes that train together, each on a GPU of its own", ge=1, le=64)
    compile: bool = live(
        False, "let torch.compile make kernels for the blocks; needs a C++ compiler, and minutes at start"
    )
    recipe: Literal["standardized", "reference"] = fixed(
        "standardized",
        "reference: the recipe that published adapters were trained with, for comparison; see benchmarks/recipe.md",
        of="adapters",
    )
    lr: float = fixed(1e-3, "peak learning rate; 1 is for prodigy, which finds its own", gt=0, le=1)
    warmup: int = fixed(100, "steps of linear warm-up", ge=0)
    decay_fraction: float = fixed(
        0.3, "share of the planned steps, at the end, over which the rate falls to 0", ge=0, le=1
    )
    weight_decay: float = fixed(0.01, "AdamW decay of matrices (never of norms, biases and embeddings)", ge=0)
    grad_clip: float = fixed(1.0, "largest gradient norm; 0 or less turns clipping off")
    cos_weight: float = fixed(0.5, "weight of 1 - cosine beside the standardized squared error", of="adapters", ge=0)
    sigma_floor: float = fixed(
        0.03, "smallest standard deviation a target dimension is divided by", of="adapters", gt=0
    )
    shuffle_mb: int = fixed(
        512, "MB of rows that are mixed with each other; every process holds twice as much", of="adapters", ge=1
    )
    device: str = live("auto", "as precompute.device")
    log_every: int = live(25, "steps between lines of the log and looks at your files", ge=1)
    val_every: int = fixed(500, "steps between validations; the best of them is exported", ge=1)
    save_every: int = live(250, "steps between saves of the training state", ge=1)
    keep_every: int = live(
        0,
        "steps between kept checkpoints that can be exported at any later time; 0: none; of a LoRA, those that the "
        "ladder judges (1, 20, 100 and 500) always are",
        ge=0,
    )
    keep_last: int = live(0, "kept checkpoints to hold at most, newest first; 0: all", ge=0)
    seed: int = fixed(42, "seed of the initial weights and of the order of samples", ge=0, le=_SEEDS)

    @field_validator("grad_clip")
    @classmethod
    def _off(cls, value: float) -> float:
        return max(value, 0.0)


class Export(Group):
    """The exported file."""

    name: str | None = fixed(None, "base name of the file, without -f16.gguf or .safetensors; null: the pack's")
    dir: str | None = fixed(None, "folder of the file; null: beside the run's folder")
    copy_to: str | None = fixed(None, "another folder to copy the file to, such as the engine's models; null: none")
    dtype: Literal["bf16", "f16", "f32"] = fixed("bf16", "numbers in the file", of="LoRAs")
    companion: bool = live(
        True,
        "also write the file that goes with the adapter, for packs that have one (llada_image: SigVQ, 2.4 GB)",
        of="adapters",
    )


class Evaluate(Group):
    """The exported file, looked at as its users do, and against the shards that were not trained on."""

    device: str = live("auto", "as precompute.device")
    prompts: list[str] = fixed(
        [], "pictures are made of these, with and without the LoRA; []: the instance prompt or val captions", of="LoRAs"
    )
    seeds: list[int] = fixed([0, 1], "of the noise they start from", of="LoRAs", min_length=1, max_length=16)
    steps: int | None = fixed(None, "denoising steps of a picture; null: the family's", of="LoRAs", ge=1, le=1000)
    guidance: float | None = fixed(None, "guidance of a picture; null: the family's", of="LoRAs", ge=0)
    worst: int = fixed(20, "val prompts with the lowest cosine to list in the report", of="adapters", ge=0, le=1000)


class Snapshot(Group):
    """The `snapshot` target: a step-tagged file of a run as it is now."""

    at: str = live("newest", "newest, best, or the step of a kept checkpoint")
    evaluate: bool = live(True, "also score the file on the val shards (on the CPU while training runs)")


class Publish(Group):
    """The `publish` target: the exported file and its card in a repository of the Hugging Face hub."""

    repository: str | None = live(
        None,
        "where to, such as me/my-adapter; one that is not there is made, as a private one",
        pattern=r"^[\w.-]+/[\w.-]+$",
    )
    license: str | None = fixed(
        None,
        "license of the file, by the hub's name of it, such as apache-2.0; null: the card says that none is chosen",
    )


class Settings(Group):
    """All settings of one run."""

    pack: str = fixed("demo", "what to train: the name of a folder in packs/")
    run: str | None = fixed(None, "name of the run's folder; null: the pack's name", pattern=r"^[A-Za-z0-9][\w.-]*$")
    runs_dir: str = fixed("runs", "folder that holds all runs")
    materials: Materials = Materials()
    corpus: Corpus = Corpus()
    pictures: Pictures = Pictures()
    precompute: Precompute = Precompute()
    adapter: Adapter = Adapter()
    lora: Lora = Lora()
    train: Train = Train()
    export: Export = Export()
    evaluate: Evaluate = Evaluate()
    snapshot: Snapshot = Snapshot()
    publish: Publish = Publish()

    @field_validator("pack")
    @classmethod
    def _known_pack(cls, value: str) -> str:
        if value not in packs.names():
            raise ValueError(f"no such pack; the packs are {', '.join(packs.names())}")
        return value

    @model_validator(mode="after")
    def _resolve(self) -> "Settings":
        pack = packs.get(self.pack)
        self.run = self.run or self.pack
        self.export.name = self.export.name or pack.file_name
        self.export.dir = self.export.dir or self.runs_dir
        (self._resolve_lora if isinstance(pack, LoraPack) else self._resolve_adapter)(pack)
        return self

    def _resolve_adapter(self, pack: AdapterPack) -> None:
        for field in ("student_dim", "teacher_dim", "queries", "vocabulary", "vision_dim"):
            if getattr(self.adapter, field) is None:
                setattr(self.adapter, field, getattr(pack, field))
            elif getattr(pack, field) is None:
                raise ValueError(f"adapter.{field} is set, and adapters of pack {pack.name} have none: remove it")
        if self.precompute.teacher == "synthetic" and not self.export.name.endswith("-synthetic"):
            self.export.name += "-synthetic"

    def _resolve_lora(self, pack: LoraPack) -> None:
        lora, family = self.lora, families.get(pack.family)
        if lora.snr_gamma and family.objective != "diffusion":
            raise ValueError(f"lora.snr_gamma is set, and {family.title} has no such weights: remove it")
        if lora.flow_shift and family.objective != "flow":
            raise ValueError(f"lora.flow_shift is set, and {family.title} has no such schedule: remove it")
        if lora.guidance != 1 and family.name != "flux":
            raise ValueError(f"lora.guidance is set, and {family.title} is not told any: remove it")
        self.pictures.resolution = self.pictures.resolution or family.resolution
        lora.alpha = lora.alpha or float(lora.rank)
        for field in ("text_dropout", "timesteps", "flow_shift", "snr_gamma"):
            if getattr(lora, field) is None:
                setattr(lora, field, getattr(family, field))
        paths = self.materials.paths
        if lora.base and bases.is_folder(lora.base) and paths.setdefault("base", lora.base) != lora.base:
            raise ValueError("lora.base and materials.paths.base are two places: set one of them")

    @property
    def folder(self) -> str:
        """The run's folder."""
        return f"{self.runs_dir}/{self.run}"

    @property
    def exported(self) -> str:
        """The exported file."""
        return f"{self.export.dir}/{self.export.name}{packs.get(self.pack).suffix}"

    @property
    def exports(self) -> list[str]:
        """The exported file, and what is written of the same weights beside it for other programs."""
        return [self.exported, *(f"{self.export.dir}/{self.export.name}{end}" for end in packs.get(self.pack).more)]

    @property
    def companion(self) -> str | None:
        """The file that is written beside the exported one, of a pack that has one; none for a synthetic teacher."""
        material = packs.get(self.pack).companion
        wanted = self.export.companion and self.precompute.teacher == "real"
        return f"{self.export.dir}/{self.export.name}_{material.id}-f16.gguf" if material and wanted else None

    def samples(self, split: Split) -> int:
        """Number of samples of a split that the settings ask for, at most."""
        pack, corpus = packs.get(self.pack), self.corpus
        if isinstance(pack, LoraPack):
            return _lora_samples(self, pack, split)
        if split == "probe":
            return len(probe.prompts())
        if pack.vision_dim:
            train, val = corpus.n_image + corpus.n_two + corpus.n_text, corpus.n_val_image + corpus.n_val_text
        else:
            train, val = corpus.n_train, corpus.n_val
        return train if split == "train" else val

    def blocks(self, split: Split) -> int:
        """Number of precompute jobs of a split: known before the corpus, so that a dry run can list them."""
        if split == "probe":
            return 1
        count = -(-self.samples(split) // (self.precompute.shard_size * self.precompute.block_shards))
        # Pictures come and go: a power of two seldom changes, and with it the shards that all others belong to.
        return 1 << (count - 1).bit_length() if "LoRAs" in packs.get(self.pack).kinds else count


def _lora_samples(settings: Settings, pack: LoraPack, split: Split) -> int:
    """The pictures that are there, and their captions with the empty one; of few pictures, all are for both splits."""
    options = settings.pictures
    own = picture_sources.count(options.folder) if options.folder else pack.pictures
    others = picture_sources.count(options.regularization) if options.regularization else 0
    held_out = own if own < MIN_HELD_OUT else ceil(options.holdout * own)
    return max(1, {"train": own + others, "val": held_out, "text": own + others + 1}[split])


def merged(files: Iterable[Path | str], overrides: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What files of settings come to, later ones over earlier ones and `overrides` (--config) over all.

    Returns:
        The configuration, and in words what was understood of names that other trainers give to settings.

    Raises:
        TrainerError: a file cannot be read.
    """
    config: dict[str, Any] = {}
    words = []
    for source in [*map(_read, files), overrides]:
        settings, said = aliases.understood(source)
        words += said
        _update(config, settings)
    return config, words


def _read(file: Path | str) -> Any:
    try:
        return yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainerError(f"{file} cannot be read as settings: {' '.join(str(error).split())}") from None


def _update(config: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _update(config[key], value)
        else:
            config[key] = value


def load(config: dict[str, Any]) -> Settings:
    """Check a merged configuration.

    Raises:
        TrainerError: one sentence naming the key, the value and what is allowed.
    """
    try:
        settings = Settings.model_validate(config)
    except ValidationError as errors:
        raise TrainerError(_sentence(errors.errors()[0])) from None
    pack = packs.get(settings.pack)
    problem = _stray(settings, pack.kinds)
    if not problem and "pictures" in pack.kinds and (wrong := _problem_of_pictures(settings)):
        problem = f"takes {wrong}"
    if problem:
        raise TrainerError(f"the pack {settings.pack} {problem}")
    if settings.train.lr == 1 and settings.lora.optimizer != "prodigy":
        raise TrainerError("setting `train.lr` is 1.0, which is for lora.optimizer prodigy alone; set it lower")
    if isinstance(pack, LoraPack):
        bases.refuse_name(
            base_of(settings), families.get(pack.family), settings.lora.base_precision, settings.lora.trusted
        )
    return settings


def warnings(settings: Settings) -> list[str]:
    """What to know of settings that can be used."""
    pack = packs.get(settings.pack)
    return bases.warnings(base_of(settings), families.get(pack.family)) if isinstance(pack, LoraPack) else []


def base_of(settings: Settings) -> str:
    """The base model of a LoRA, as the settings name it: a folder or a repository."""
    named = settings.materials.paths.get("base") or settings.lora.base
    return named or families.get(packs.get(settings.pack).family).repository


_NOT = {"pictures": "takes no pictures", "adapters": "trains no adapter", "LoRAs": "trains no LoRA"}


def _stray(settings: Settings, kinds: Container[Kind]) -> str | None:
    """What is wrong with a setting that differs from its default and is for packs of another kind."""
    for name in Settings.model_fields:
        group = getattr(settings, name)
        if isinstance(group, Group):
            values = group.model_dump(mode="json")
            for key, inner in sorted(type(group).model_fields.items()):
                kind = next((k for k in (group.of, group.kind(key)) if k and k not in kinds), None)
                if kind and values[key] != inner.default:
                    return f"{_NOT[kind]}; leave the setting `{name}.{key}` out"
    return None


def _problem_of_pictures(settings: Settings) -> str | None:
    corpus = settings.corpus
    for key, counts in (("n_train", "n_image, n_two and n_text"), ("n_val", "n_val_image and n_val_text")):
        if getattr(corpus, key) != Corpus.model_fields[key].default:
            return f"pictures; instead of the setting `corpus.{key}`, set corpus.{counts}"
    if corpus.train_file:
        return "pictures; instead of the setting `corpus.train_file`, set corpus.files"
    if not (corpus.image_presets or corpus.image_folders):
        return "pictures; set corpus.image_presets or corpus.image_folders"
    if not (corpus.n_image and corpus.n_val_image):
        return "pictures; set both corpus.n_image and corpus.n_val_image"
    if bool(corpus.n_text) != bool(corpus.n_val_text):
        return "prompts without pictures for both splits or for neither; set both corpus.n_text and corpus.n_val_text"
    if corpus.n_text and not (corpus.presets or corpus.files):
        return "prompts without pictures from corpus.presets and corpus.files; set one of them, or corpus.n_text to 0"
    return None


def _sentence(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location) or "configuration"
    if error["type"] == "extra_forbidden":
        allowed = _fields(location[:-1])
        if instead := aliases.INSTEAD.get(location[-1]):
            return f"setting `{key}` does not exist; {instead}"
        near = difflib.get_close_matches(location[-1], allowed, n=1, cutoff=0.5)
        hint = f"did you mean `{'.'.join([*location[:-1], near[0]])}`?" if near else f"known are {', '.join(allowed)}"
        return f"setting `{key}` does not exist; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not isinstance(error["input"], str | int | float | bool):
        return f"settings of `{key}`: {message}"
    return f"setting `{key}` is {error['input']!r}: {message[0].lower()}{message[1:]}"


def _fields(location: list[str]) -> list[str]:
    group: Any = Settings
    for part in location:
        group = group.model_fields[part].annotation
    return list(group.model_fields)


def write_stage_settings(settings: Settings, *only: str) -> None:
    """Write `settings/<stage>.json` of the run (of all stages, or of those named), each only if its content changed.

    Rules take these files as inputs, so that a changed setting redoes the stages that depend on it and no other. A
    job writes its own again before its output: a dry run or a snapshot with other settings may have changed it while
    the job ran, and Snakemake, which looks at inputs when a job has ended, would take the output for fresh.
    """
    write_stages(settings, stage_settings(settings, *only))


def write_stages(settings: Settings, stages: dict[str, Any]) -> None:
    """Write what `stage_settings` gave, maybe some time ago."""
    for stage, content in stages.items():
        write_if_changed(Path(settings.folder) / "settings" / f"{stage}.json", content)


def stage_settings(settings: Settings, *only: str) -> dict[str, Any]:
    """What each stage (of all, or of those named) depends on, and what lies in folders of pictures now.

    Raises:
        TrainerError: there is no such folder.
    """
    pack = packs.get(settings.pack)
    stages: dict[str, Any] = {
        "materials": {"pack": settings.pack, **settings.materials.model_dump(include={"paths", "revisions"})},
        "plan": {"steps": settings.train.steps},
        "export": {"run": settings.run, **settings.export.fingerprint(pack.kinds)},
        "evaluate": settings.evaluate.fingerprint(pack.kinds),
        "card": {"companion": settings.companion, **settings.publish.fingerprint(pack.kinds)},
        # No rule's input: what `trainer.status` knows the run by. Relative paths are of that folder.
        "run": {"folder": str(Path.cwd()), "settings": settings.model_dump(mode="json")},
    }
    stages |= (_lora_stages if isinstance(pack, LoraPack) else _adapter_stages)(settings, pack)
    if not only or "corpus" in only:
        stages["corpus"] |= _folders(settings)
    return {stage: stages[stage] for stage in only or stages}


def _folders(settings: Settings) -> dict[str, Any]:
    """Digests of what lies in folders that the corpus is built from."""
    found = {path: picture_sources.folder_digest(path) for path in settings.corpus.image_folders}
    for name in ("folder", "regularization"):
        if path := getattr(settings.pictures, name):
            found[path] = captions.folder_digest(path, f"pictures.{name}")
    return {"image_folders": found} if found else {}


def _adapter_stages(settings: Settings, pack: AdapterPack) -> dict[str, Any]:
    adapter = settings.adapter.fingerprint(pack.kinds)
    teacher = {"pack": settings.pack, "teacher": settings.precompute.teacher}
    stages: dict[str, Any] = {
        "corpus": settings.corpus.fingerprint(pack.kinds) | {"probe": digest(probe.prompts())},
        "precompute": {
            "pack": settings.pack,
            "adapter": {key: value for key, value in adapter.items() if key not in ("width", "depth")},
        }
        | _precompute_stage(settings, ("train", "val")),
        "train": {"adapter": adapter, "train": settings.train.fingerprint(pack.kinds)},
    }
    if pack.vision_dim:
        stages["vision_proj"] = teacher | settings.adapter.model_dump(include={"student_dim", "vision_dim"})
    if pack.vocabulary:
        shape = settings.adapter.model_dump(include={"width", "teacher_dim", "vocabulary"})
        stages["seed_table"] = teacher | shape
    return stages


def _lora_stages(settings: Settings, pack: LoraPack) -> dict[str, Any]:
    if not (settings.pictures.folder or pack.pictures):
        raise TrainerError(f"the pack {pack.name} learns from your pictures: set pictures.folder to their folder")
    pictures, lora = settings.pictures.fingerprint(pack.kinds), settings.lora.fingerprint(pack.kinds)
    base = {"base": lora.pop("base")}
    return {
        "materials": {"pack": settings.pack, **base} | settings.materials.model_dump(include={"paths", "revisions"}),
        "corpus": pictures,
        "precompute": {"pack": settings.pack}
        | {"pictures": {key: pictures[key] for key in ("crop", "variants", "flip", "seed")}}
        | _precompute_stage(settings, pack.splits),
        "train": {"lora": lora, "train": settings.train.fingerprint(pack.kinds)},
    }


def _precompute_stage(settings: Settings, splits: Iterable[Split]) -> dict[str, Any]:
    stage = settings.precompute.fingerprint(packs.get(settings.pack).kinds) | {"format": shard_index.FORMAT}
    # A sample's shard depends on their number, also where the corpus stays the same.
    return stage | {"blocks": {split: settings.blocks(split) for split in splits}}


def read_steps(configfiles: list[str], overrides: dict[str, Any], default: int) -> int:
    """The planned steps as the user's files say now: the last file that has the key wins, --config over all.

    A file that is empty or cannot be read at this moment (an editor is writing it) keeps `default`.

    Raises:
        TrainerError: the value is not a positive whole number.
    """
    steps: Any = default
    try:
        sources = [yaml.safe_load(Path(file).read_text(encoding="utf-8")) for file in configfiles]
    except (OSError, yaml.YAMLError):
        return default
    if None in sources:
        return default
    for source in [*sources, overrides]:
        group = aliases.understood(source)[0].get("train")
        if isinstance(group, dict) and "steps" in group:
            steps = group["steps"]
    return load({"train": {"steps": steps}}).train.steps
