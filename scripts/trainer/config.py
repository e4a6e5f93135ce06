"""Every setting: its type, its default, what it does, and whether a change of it makes computed things stale.

`config.yaml` and `config.schema.json` are written from here (`python scripts/write_config.py`). Precedence:
config.yaml < packs/<pack>/pack.yaml < the user's own file < --config. Snakemake merges them; `load` checks the result.
"""

import difflib
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

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

from trainer import packs, picture_sources, probe, shard_index
from trainer.corpus_files import Split
from trainer.errors import TrainerError
from trainer.files import digest, write_if_changed

Preset = Literal["demo", "gustavosta", "midjourney", "diffusiondb", "vidprom"]
ImagePreset = Literal["flickr30k", "coco_captions"]


def live(default: Any, description: str, **constraints: Any) -> Any:
    """A field that may change at any time: nothing that was computed depends on it."""
    return Field(default, description=description, json_schema_extra={"live": True}, **constraints)


def fixed(default: Any, description: str, **constraints: Any) -> Any:
    """A field that results depend on: when it changes, its stage and all below are redone."""
    return Field(default, description=description, **constraints)


def of_pictures(default: Any, description: str, **constraints: Any) -> Any:
    """A fixed field of packs that take pictures; nothing of other packs depends on it."""
    return Field(default, description=description, json_schema_extra={"pictures": True}, **constraints)


class Group(BaseModel):
    """One group of settings. Snakemake hands values of --config as strings: they are coerced."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _null(cls, value: Any, info: ValidationInfo) -> Any:
        optional = NoneType in get_args(cls.model_fields[str(info.field_name)].annotation)
        is_null = isinstance(value, str) and value.strip().lower() in ("null", "none", "~", "")
        return None if optional and is_null else value

    @classmethod
    def marked(cls, mark: Literal["live", "pictures"]) -> set[str]:
        """Names of the fields made by `live` or by `of_pictures`."""
        fields = cls.model_fields.items()
        return {name for name, field in fields if isinstance(e := field.json_schema_extra, dict) and e.get(mark)}

    def fingerprint(self, pictures: bool = False) -> dict[str, Any]:
        """The settings that results depend on, as JSON-able values; of those `of_pictures` only if asked for."""
        return self.model_dump(
            mode="json", exclude=self.marked("live") | (set() if pictures else self.marked("pictures"))
        )


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
    image_presets: list[ImagePreset] = of_pictures(
        [], "sets of captioned pictures: flickr30k (31,000), coco_captions (113,000), both downloaded"
    )
    image_folders: list[str] = of_pictures(
        [], "folders of your own pictures, with captions, one a line, in 01.txt beside 01.jpg where there are some"
    )
    n_image: int = of_pictures(0, "training samples with one picture, at most", ge=0)
    n_two: int = of_pictures(0, "training samples with two pictures, at most", ge=0)
    n_text: int = of_pictures(0, "training samples without a picture, at most: prompts of presets and files", ge=0)
    n_val_image: int = of_pictures(0, "validation samples with one picture, at most", ge=0)
    n_val_text: int = of_pictures(0, "validation samples without a picture, at most", ge=0)
    max_bad_pictures: float = Field(
        0.3,
        description="broken pictures are left out, but more than this share of a source stop the run",
        json_schema_extra={"live": True, "pictures": True},
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


class Precompute(Group):
    """Teacher rows and student states of every prompt, written as shards."""

    teacher: Literal["real", "synthetic"] = fixed(
        "real", "synthetic: learnable made-up targets for a smoke run without the teacher; never a usable adapter"
    )
    device: str = live("auto", "auto (the GPU with the most free memory, else cpu), cpu, cuda, cuda:1, ...")
    shard_size: int = fixed(1024, "prompts a shard, on average", ge=1)
    block_shards: int = fixed(4, "shards a job: the teacher is loaded once a block", ge=1, le=100)
    teacher_dtype: Literal["auto", "bf16", "f16", "f32"] = fixed(
        "auto", "auto: bf16 on a GPU or a CPU that multiplies in bf16, else f32"
    )
    student_dtype: Literal["auto", "bf16", "f16", "f32"] = fixed("auto", "as teacher_dtype, for the student")
    storage: Literal["bf16", "int8"] = fixed(
        "bf16", "how rows are stored in shards; int8, with a scale for each row, takes half the space"
    )
    batch_tokens: int = live(
        0, "tokens a batch, padding included; 0: 1024 a GiB of GPU memory, 2048 on a CPU", ge=0, le=1_000_000
    )
    gpu_gib: float = live(0, "GPU memory a job may use, in GiB; 0: nearly all that is free", ge=0)
    ram_gib: float = live(
        0, "main memory a job may use, in GiB; 0: nearly all that is free, at most the rule's mem_mb", ge=0
    )
    max_bad_fraction: float = live(
        0.05, "samples skipped (too long, non-finite rows) beyond this share of a block stop the run", ge=0, le=1
    )
    reference_areas: list[tuple[PositiveInt, PositiveFloat]] = of_pictures(
        [[147456, 0.35], [262144, 0.35], [589824, 0.2], [1048576, 0.1]],
        "areas in pixels, each with its share of the samples, that reference pictures are scaled to where the engine "
        "scales them to the area of its output",
        min_length=1,
    )
    two_image_max_area: int = of_pictures(262144, "the largest of these areas for samples with two pictures", ge=1024)


class Adapter(Group):
    """The shape of the network that is trained."""

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
    vision_dim: int | None = of_pictures(
        None, "size of a row of the vision tower; null: the pack's, or none for a pack without pictures", ge=1
    )


class Train(Group):
    """The training of the adapter. `steps` can change at any time, also while training runs."""

    steps: int = live(20000, "planned optimizer steps; re-read from your files while training runs", ge=1)
    batch_size: int = fixed(32, "prompts a step", ge=1)
    batch_tokens: int = live(
        0,
        "rows (student's and teacher's) a forward pass; gradients add up exactly to the batch's; 0: all of them",
        ge=0,
    )
    processes: int = live(1, "processes that train together, each on a GPU of its own", ge=1, le=64)
    compile: bool = live(
        False, "let torch.compile make kernels for the blocks; needs a C++ compiler, and minutes at start"
    )
    recipe: Literal["standardized", "reference"] = fixed(
        "standardized",
        "reference: the recipe that published adapters were trained with, for comparison; see benchmarks/recipe.md",
    )
    lr: float = fixed(1e-3, "peak learning rate", gt=0, lt=1)
    warmup: int = fixed(100, "steps of linear warm-up", ge=0)
    decay_fraction: float = fixed(
        0.3, "share of the planned steps, at the end, over which the rate falls to 0", ge=0, le=1
    )
    weight_decay: float = fixed(0.01, "AdamW decay of matrices (never of norms, biases and embeddings)", ge=0)
    grad_clip: float = fixed(1.0, "largest gradient norm; 0 turns clipping off", ge=0)
    cos_weight: float = fixed(0.5, "weight of 1 - cosine beside the standardized squared error", ge=0)
    sigma_floor: float = fixed(0.03, "smallest standard deviation a target dimension is divided by", gt=0)
    shuffle_mb: int = fixed(512, "MB of rows that are mixed with each other; every process holds twice as much", ge=1)
    device: str = live("auto", "as precompute.device")
    log_every: int = live(25, "steps between lines of the log and looks at your files", ge=1)
    val_every: int = fixed(500, "steps between validations; the best of them is exported", ge=1)
    save_every: int = live(250, "steps between saves of the training state", ge=1)
    keep_every: int = live(0, "steps between kept checkpoints that can be exported at any later time; 0: none", ge=0)
    keep_last: int = live(0, "kept checkpoints to hold at most, newest first; 0: all", ge=0)
    seed: int = fixed(42, "seed of the initial weights and of the order of samples", ge=0)


class Pictures(Group):
    """The pictures that a LoRA learns from, and how they are cut to what the model takes."""

    folder: str | None = fixed(
        None, "folder of the pictures; captions in 01.txt or 01.caption beside 01.jpg, or in metadata.jsonl"
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
    seed: int = fixed(8, "seed of the holdout and of random crops", ge=0)

    @field_validator("folder", "regularization")
    @classmethod
    def _home(cls, value: str | None) -> str | None:
        return value and str(Path(value).expanduser())

    @field_validator("caption_column", mode="before")
    @classmethod
    def _blank(cls, value: Any) -> Any:
        return "text" if value is None or not str(value).strip() else value

    @model_validator(mode="after")
    def _consistent(self) -> "Pictures":
        if self.ratios % 2 == 0:
            raise ValueError(f"ratios is {self.ratios}: it must be odd, so that squares are among them")
        if self.variants > 1 and self.crop != "random":
            raise ValueError("variants are random crops: set crop to random, or variants to 1")
        if self.regularization and self.regularization == self.folder:
            raise ValueError("regularization is the same folder as folder: its pictures would be trained on twice")
        return self


class Export(Group):
    """The adapter file."""

    name: str | None = fixed(None, "base name of the file, without -f16.gguf; null: the pack's")
    dir: str | None = fixed(None, "folder of the file; null: beside the run's folder")
    copy_to: str | None = fixed(None, "another folder to copy the file to, such as the engine's models; null: none")
    companion: bool = live(
        True, "also write the file that goes with the adapter, for packs that have one (llada_image: SigVQ, 2.4 GB)"
    )


class Evaluate(Group):
    """The exported file against the val shards."""

    device: str = live("auto", "as precompute.device")
    worst: int = fixed(20, "val prompts with the lowest cosine to list in the report", ge=0, le=1000)


class Snapshot(Group):
    """The `snapshot` target: a step-tagged file of a run as it is now."""

    at: str = live("newest", "newest, best, or the step of a kept checkpoint")
    evaluate: bool = live(True, "also score the file on the val shards (on the CPU while training runs)")


class Publish(Group):
    """The `publish` target: the adapter and its card in a repository of the Hugging Face hub."""

    repository: str | None = live(
        None,
        "where to, such as me/my-adapter; one that is not there is made, as a private one",
        pattern=r"^[\w.-]+/[\w.-]+$",
    )
    license: str | None = fixed(
        None,
        "license of the adapter, by the hub's name of it, such as apache-2.0; null: the card says that none is chosen",
    )


class Settings(Group):
    """All settings of one run."""

    pack: str = fixed("demo", "what to train: the name of a folder in packs/")
    run: str | None = fixed(None, "name of the run's folder; null: the pack's name", pattern=r"^[A-Za-z0-9][\w.-]*$")
    runs_dir: str = fixed("runs", "folder that holds all runs")
    materials: Materials = Materials()
    corpus: Corpus = Corpus()
    precompute: Precompute = Precompute()
    adapter: Adapter = Adapter()
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
        for field in ("student_dim", "teacher_dim", "queries", "vocabulary", "vision_dim"):
            if getattr(self.adapter, field) is None:
                setattr(self.adapter, field, getattr(pack, field))
            elif getattr(pack, field) is None:
                raise ValueError(f"adapter.{field} is set, and adapters of pack {pack.name} have none: remove it")
        self.export.name = self.export.name or pack.file_name
        if self.precompute.teacher == "synthetic" and not self.export.name.endswith("-synthetic"):
            self.export.name += "-synthetic"
        self.export.dir = self.export.dir or self.runs_dir
        return self

    @property
    def folder(self) -> str:
        """The run's folder."""
        return f"{self.runs_dir}/{self.run}"

    @property
    def gguf(self) -> str:
        """The exported file."""
        return f"{self.export.dir}/{self.export.name}-f16.gguf"

    @property
    def companion(self) -> str | None:
        """The file that is written beside the exported one, of a pack that has one; none for a synthetic teacher."""
        material = packs.get(self.pack).companion
        wanted = self.export.companion and self.precompute.teacher == "real"
        return f"{self.export.dir}/{self.export.name}_{material.id}-f16.gguf" if material and wanted else None

    def samples(self, split: Split) -> int:
        """Number of samples of a split that the settings ask for, at most."""
        if split == "probe":
            return len(probe.prompts())
        corpus = self.corpus
        if packs.get(self.pack).vision_dim:
            train, val = corpus.n_image + corpus.n_two + corpus.n_text, corpus.n_val_image + corpus.n_val_text
        else:
            train, val = corpus.n_train, corpus.n_val
        return train if split == "train" else val

    def blocks(self, split: Split) -> int:
        """Number of precompute jobs of a split: fixed by the settings, so that a dry run can list them."""
        if split == "probe":
            return 1
        precompute = self.precompute
        return -(-self.samples(split) // (precompute.shard_size * precompute.block_shards))


def load(config: dict[str, Any]) -> Settings:
    """Check a merged configuration.

    Raises:
        TrainerError: one sentence naming the key, the value and what is allowed.
    """
    try:
        settings = Settings.model_validate(config)
    except ValidationError as errors:
        raise TrainerError(_sentence(errors.errors()[0])) from None
    problem = _problem_of_pictures(settings) if packs.get(settings.pack).vision_dim else _stray_pictures(settings)
    if problem:
        raise TrainerError(f"the pack {settings.pack} takes {problem}")
    return settings


def _stray_pictures(settings: Settings) -> str | None:
    for name, group in (("corpus", settings.corpus), ("precompute", settings.precompute)):
        values = group.model_dump(mode="json")
        for key in sorted(group.marked("pictures")):
            if values[key] != type(group).model_fields[key].default:
                return f"no pictures; leave the setting `{name}.{key}` out"
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
    """What each stage (of all, or of those named) depends on, and what lies in image folders now."""
    pictures = packs.get(settings.pack).vision_dim is not None
    corpus = settings.corpus.fingerprint(pictures) | {"probe": digest(probe.prompts())}
    if (folders := settings.corpus.image_folders) and (not only or "corpus" in only):
        corpus |= {"image_folders": {path: picture_sources.folder_digest(path) for path in folders}}
    adapter = settings.adapter.fingerprint(pictures)
    rows = {key: value for key, value in adapter.items() if key not in ("width", "depth")}
    stages: dict[str, Any] = {
        "materials": {"pack": settings.pack, **settings.materials.model_dump(include={"paths", "revisions"})},
        "corpus": corpus,
        "precompute": {"pack": settings.pack, "adapter": rows}
        | settings.precompute.fingerprint(pictures)
        | {"format": shard_index.FORMAT}
        # A sample's shard depends on their number, also where the corpus stays the same.
        | {"blocks": {split: settings.blocks(split) for split in ("train", "val")}},
        "train": {"adapter": adapter, "train": settings.train.fingerprint()},
        "plan": {"steps": settings.train.steps},
        "export": {"run": settings.run, **settings.export.fingerprint()},
        "evaluate": settings.evaluate.fingerprint(),
        "card": {"companion": settings.companion, **settings.publish.fingerprint()},
    }
    if settings.adapter.vision_dim:
        stages["vision_proj"] = {
            "pack": settings.pack,
            "teacher": settings.precompute.teacher,
            **settings.adapter.model_dump(include={"student_dim", "vision_dim"}),
        }
    # No rule's input: what `trainer.status` knows the run by. Relative paths are of that folder.
    stages["run"] = {"folder": str(Path.cwd()), "settings": settings.model_dump(mode="json")}
    if settings.adapter.vocabulary:
        stages["seed_table"] = {
            "pack": settings.pack,
            "teacher": settings.precompute.teacher,
            **settings.adapter.model_dump(include={"width", "teacher_dim", "vocabulary"}),
        }
    return {stage: stages[stage] for stage in only or stages}


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
        group = source.get("train") if isinstance(source, dict) else None
        if isinstance(group, dict) and "steps" in group:
            steps = group["steps"]
    return load({"train": {"steps": steps}}).train.steps
