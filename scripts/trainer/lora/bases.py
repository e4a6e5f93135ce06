"""What a base model is, and why one is refused: by its name, then by its small files, before any weight is opened.

Light to import: the Snakefile asks on every call.
"""

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.lora import families
from trainer.lora.families import Family

# Repositories (patterns) of those who made the families, or that hold their models in diffusers' layout.
TRUSTED = (
    "stabilityai/stable-diffusion-xl-base-1.0",
    "black-forest-labs/FLUX.1-*",
    "Qwen/Qwen-Image*",
    "Tongyi-MAI/Z-Image*",
    "unsloth/*",
)
GATED = ("black-forest-labs/FLUX.1-*",)
# Words that begin in names of models that are run by others, and cannot be trained here.
_OTHERS = ("sd3", "stable-diffusion-3", "pixart", "sana", "lumina", "cogview", "hunyuan-dit", "hunyuandit")
_FOUR_BITS = ("bnb-4bit", "-4bit", "int4", "nf4")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DENSE = ("f32", "bf16", "f16")
# By family, what its models are called; in this order.
_NAMES: dict[families.Name, str] = {
    "qwen_image": r"qwen[-_. ]?image",
    "z_image": r"z[-_. ]?image",
    "flux": r"flux",
    "sdxl": r"sd[-_. ]?xl|stable-diffusion-xl",
}


def is_folder(base: str) -> bool:
    """Whether a base is named by a place on this machine, not by a repository of the hub."""
    return Path(base).exists() or base.startswith(("/", ".", "~")) or base.count("/") != 1


def guessed(name: str) -> Family | None:
    """The family that a name tells, if it does."""
    return next((families.get(it) for it, words in _NAMES.items() if re.search(words, name.lower())), None)


def family_of(folder: Path) -> Family | None:
    """The family of a pipeline's folder: by the class in its model_index.json; by its name only where it has none.

    Raises:
        TrainerError: its model_index.json cannot be read, or is of a pipeline that no LoRA can be trained for here.
    """
    if not (folder / "model_index.json").is_file():
        return guessed(folder.name)
    pipeline = _pipeline(folder)
    if not (family := families.of_pipeline(pipeline)):
        raise TrainerError(f"{folder} is a {pipeline}, which cannot be trained here; {_trainable()}")
    return family


def refuse_name(base: str, family: Family, precision: str, trusted: Iterable[str] = ()) -> None:
    """Refuse a base by what its name and the settings tell.

    Args:
        base: a repository, or a folder, which may be missing yet.
        family: the one that the run is for.
        precision: the setting `lora.base_precision`.
        trusted: patterns of further repositories to trust.

    Raises:
        TrainerError: what is wrong, and what to do.
    """
    if precision == "f16" and family.bf16_only:
        raise TrainerError(
            f"{family.title} needs bf16: values in it are too large for f16; set lora.base_precision to bf16 or auto"
        )
    name, indexed = Path(base).name.lower(), (Path(base) / "model_index.json").is_file()
    if name.endswith(".gguf") or ("gguf" in name and not indexed):
        raise TrainerError(
            f"{base} is a GGUF model, which runs but cannot be trained on: a LoRA needs the whole model as diffusers "
            f"keeps it; {_trainable()}"
        )
    if indexed:
        return  # its class tells more than its name: `check`
    if other := next((word for word in _OTHERS if re.search(rf"(?<![a-z]){word}", base.lower())), None):
        raise TrainerError(f"{base} is of another family ({other}), which cannot be trained here; {_trainable()}")
    if is_folder(base):
        return
    if not any(fnmatch(base, pattern) for pattern in (*TRUSTED, *trusted)):
        raise TrainerError(
            f"{base} is no repository that is trusted, so nothing of it is downloaded; use a folder on this machine, "
            f"or add it to lora.trusted if you trust it ({', '.join(TRUSTED)} are)"
        )
    if (other := guessed(base)) and other is not family:
        raise TrainerError(f"{base} is {other.title} by its name, and this pack trains {family.title}; take its pack")
    if precision in _DENSE and any(word in name for word in _FOUR_BITS):
        raise TrainerError(_four_bits(base, precision))


def refuse_gated(repository: str, token: str | None) -> None:
    """Refuse to download a repository whose terms have to be accepted, without a token.

    Raises:
        TrainerError: how to get one.
    """
    if any(fnmatch(repository, pattern) for pattern in GATED) and not (token or "").strip():
        raise TrainerError(
            f"{repository} is gated: accept its license on its page and set HF_TOKEN to a token of your account, or "
            "name a folder that has it (lora.base)"
        )


def check(folder: Path, family: Family, precision: str) -> None:
    """Refuse a pipeline's folder by its small files; no file of weights is opened.

    Raises:
        TrainerError: what is wrong, and what to do.
    """
    if folder.suffix == ".gguf" or not folder.is_dir():
        refuse_name(str(folder), family, precision)
        raise TrainerError(f"{folder} is not a folder; a base model is a folder in diffusers' layout")
    for part in ("", "vae", family.part, *family.text_encoders):
        _refuse_code(folder, part)
    if (found := family_of(folder)) is not family:
        what = found.title if found else "no pipeline of diffusers: it has no model_index.json"
        raise TrainerError(f"{folder} is {what}, and this pack trains {family.title}; name another with lora.base")
    for part in ("vae", family.part, *family.text_encoders):
        if pickled := _pickled_only(folder / part):
            raise TrainerError(
                f"{folder} has its weights pickled ({part}/{pickled}), which are never read; use a copy in safetensors"
            )
    config = _json(folder / family.part / "config.json") if (folder / family.part / "config.json").is_file() else {}
    if quantization := config.get("quantization_config"):
        method = str(quantization.get("quant_method", "unknown"))
        if not (method == "bitsandbytes" and quantization.get("load_in_4bit")):
            raise TrainerError(f"{folder} is quantized ({method}), which cannot be trained on; use its dense original")
        if precision in _DENSE:
            raise TrainerError(_four_bits(folder, precision))


def is_four_bits(folder: Path, family: Family) -> bool:
    """Whether the network of a folder is stored in 4 bits already."""
    path = folder / family.part / "config.json"
    return bool(path.is_file() and _json(path).get("quantization_config", {}).get("load_in_4bit"))


def warnings(base: str, family: Family) -> list[str]:
    """What to know of a base that is no reason to refuse it."""
    distilled = "turbo" in Path(base).name.lower()
    if not distilled and family.name == "z_image":  # the two differ in nothing else that their small files tell
        scheduler = Path(base) / "scheduler" / "scheduler_config.json"
        distilled = scheduler.is_file() and _json(scheduler).get("shift") == 3.0
    if not distilled:
        return []
    return [
        f"{base} is distilled to a few steps: a LoRA trained on it tends to lose likeness or sharpness at these few "
        f"steps; train on {family.repository}, and use the LoRA with either"
    ]


def precision(
    wanted: str, family: Family, capability: tuple[int, int] | None, four_bits: bool, free: float, dense: float
) -> str:
    """The numbers that the base is kept in: `lora.base_precision`, and what `auto` comes to.

    Args:
        wanted: the setting.
        family: of the base.
        capability: compute capability of the GPU, whose bf16 counts from 8.0 on; None on a CPU.
        four_bits: whether the base is stored in 4 bits already.
        free: bytes of GPU memory that are free.
        dense: bytes of the network in bf16.

    Raises:
        TrainerError: the GPU has no bf16.
    """
    if wanted == "bf16" and capability and capability < (8, 0):
        raise TrainerError(
            "lora.base_precision is bf16, which this GPU only emulates (it takes compute capability 8.0); set it to "
            "nf4, or for SDXL to f16"
        )
    if wanted != "auto":
        return wanted
    if four_bits:
        return "nf4"
    if not capability:
        return "f32"
    if free > 1.5 * dense and capability >= (8, 0):
        return "bf16"
    return "f16" if free > 1.5 * dense and not family.bf16_only else "nf4"


def _trainable() -> str:
    titles = [f"{families.get(name).title} ({families.get(name).repository})" for name in families.names()]
    return f"trainable are {', '.join(titles)}"


def _four_bits(base: str | Path, precision: str) -> str:
    return (
        f"{base} is stored in 4 bits, and lora.base_precision is {precision}: set it to auto or nf4, or use the dense "
        "original"
    )


def _pipeline(folder: Path) -> str:
    named = _json(folder / "model_index.json").get("_class_name")
    return str(named[-1] if isinstance(named, list) and named else named)


def _refuse_code(folder: Path, part: str) -> None:
    """Refuse what only code in the folder could load."""
    file = folder / part / ("config.json" if part else "model_index.json")
    if not file.is_file():
        return
    config = _json(file)
    own = isinstance(config.get("_class_name"), list) or "auto_map" in config
    if not part:
        libraries = {str(value[0]) for value in config.values() if isinstance(value, list) and len(value) == 2}
        own = own or bool(libraries - {"diffusers", "transformers", "None"})
    if own:
        raise TrainerError(
            f"{file} asks for code of its own, which is never run; use a copy whose classes are those of diffusers and "
            "transformers"
        )


def _pickled_only(folder: Path) -> str | None:
    """A pickled file in a folder that has no weights besides."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if any(file.suffix == ".safetensors" for file in files):
        return None
    return next((file.name for file in files if file.suffix in _PICKLES), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise TrainerError(f"{path} is not a JSON object")
    return value
