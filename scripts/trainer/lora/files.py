"""LoRA files: for diffusers, for other programs, GGUF; and what is in one.

The same weights give the same bytes: tensors and metadata are sorted, and nothing says when or where a file was
written. The strength that a LoRA was trained at, alpha / rank, is in its tensors: programs that read an alpha find the
rank, those that read none take 1, and all of them apply the same.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import __version__, export, safetensors_files
from trainer.errors import TrainerError
from trainer.files import read_json, sha256, write_json, written_whole
from trainer.lora import names
from trainer.lora.families import Family

Tensors = dict[str, torch.Tensor]
OURS = "gguf_trainer."  # of our keys in a file's metadata
ADAPTER = "lora_adapter_metadata"  # the key that diffusers reads

_A, _B = ".lora_A.weight", ".lora_B.weight"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_BASE_VERSIONS = {"sdxl": "sdxl_base_v1-0", "flux": "flux1", "qwen_image": "qwen_image", "z_image": "z_image"}


@dataclass(frozen=True)
class About:
    """What a file says of itself beside its tensors.

    name: shown to people. run: whose file it is. alpha: that it was trained with.
    base: repository or name of the base model. base_sha256, dataset_sha256, settings_sha256: what it was trained from.
    steps: reached; planned_steps: wanted. checkpoint: which of the run's.
    resolution: pixels a side. pictures: trained on. prediction: of SDXL's schedule, `epsilon` or `v_prediction`.
    dead: modules of the LoRA whose output nothing in the network reads (see `dead`).
    trigger: the text that calls what was learnt, if there is one. attention: how training computed it.
    """

    name: str
    run: str
    alpha: float
    base: str
    base_sha256: str
    dataset_sha256: str
    settings_sha256: str
    steps: int
    planned_steps: int
    checkpoint: str
    resolution: int
    pictures: int
    dead: int = 0
    prediction: str | None = None
    trigger: str | None = None
    attention: str | None = None


@dataclass(frozen=True)
class Lora:
    """Weights ready for a file: `lora_A` [rank, in] and `lora_B` [out, rank] by module, one rank and one dtype."""

    family: Family
    rank: int
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]]


def folded(weights: Mapping[str, torch.Tensor], family: Family, alpha: float, dtype: torch.dtype) -> Lora:
    """Weights as they are trained, made ready for a file.

    Args:
        weights: `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], f32.
        family: of the network.
        alpha: that they were trained with; `lora_B` is multiplied by alpha / rank in f32.
        dtype: of the file: f32, f16 or bf16.

    Raises:
        TrainerError: a value is not finite, or not in that dtype.
    """
    found = {}
    for module in sorted({name.removesuffix(_A).removesuffix(_B) for name in weights}):
        a, b = (weights[module + end].detach().float().cpu() for end in (_A, _B))
        found[module] = a, b * (alpha / a.shape[0])
    for end, pick in ((_A, 0), (_B, 1)):
        for module, pair in found.items():
            if not torch.isfinite(pair[pick].to(dtype)).all():
                kind = "is not finite" if not torch.isfinite(weights[module + end]).all() else f"is beyond {dtype}"
                raise TrainerError(
                    f"{module}{end} of the LoRA has a value that {kind}: nothing was written; take an earlier "
                    "checkpoint, or train with a lower train.lr"
                )
    ranks = {a.shape[0] for a, _ in found.values()}
    (rank,) = ranks
    return Lora(family, rank, {module: (a.to(dtype), b.to(dtype)) for module, (a, b) in found.items()})


def payload_bytes(shapes: Iterable[tuple[int, int]], rank: int, dtype: torch.dtype) -> int:
    """Bytes of all tensors of a LoRA on modules of these (out, in) features: rank x (in + out) values a module."""
    return sum(rank * (out + into) for out, into in shapes) * dtype.itemsize


# --- writing --------------------------------------------------------------------------------------------------------


def outputs(path: Path) -> tuple[Path, Path, Path]:
    """The files of a LoRA: `path`, for diffusers; with names that ComfyUI knows; and GGUF, which ggk takes first."""
    return path, path.with_name(f"{path.stem}-comfyui.safetensors"), path.with_suffix(".gguf")


def write_all(path: Path, lora: Lora, about: About) -> tuple[Path, Path, Path]:
    """Write all files of a LoRA, and its sidecar.

    Raises:
        TrainerError: as `write`.
    """
    made = outputs(path)
    for write_one, out in zip((write, write_variant, write_gguf), made, strict=True):
        write_one(out, lora, about)
    write_sidecar(path, lora, about, made)
    return made


def write(path: Path, lora: Lora, about: About) -> None:
    """Write the file for diffusers, and for all that reads its names.

    Raises:
        TrainerError: the file at `path` is another run's, the disk is full, or what was read back differs.
    """
    tensors = {}
    for module, (a, b) in lora.modules.items():
        tensors |= {names.key(module, "A", lora.family): a, names.key(module, "B", lora.family): b}
    _write(path, tensors, metadata(lora, about) | {ADAPTER: _adapter(lora)}, about.run)


def write_variant(path: Path, lora: Lora, about: About) -> None:
    """Write the file with the names that both ggk and ComfyUI know, whole where they hold several modules as one.

    Raises:
        TrainerError: as `write`.
    """
    tensors = {}
    for module, (a, b) in _completed(lora).items():
        for holds, tensor in (("A", a), ("B", b), ("alpha", torch.tensor(float(lora.rank)))):
            tensors[names.variant_key(module, holds, lora.family)] = tensor
    _write(path, tensors, metadata(lora, about), about.run)


def write_gguf(path: Path, lora: Lora, about: About) -> None:
    """Write the same for ggk as GGUF; its tensors are f32, those of an f16 LoRA f16.

    Raises:
        TrainerError: as `write`.
    """
    dtype = next(iter(lora.modules.values()))[0].dtype
    dtype = torch.float16 if dtype is torch.float16 else torch.float32  # no program was seen to read bf16
    tensors = {}
    for module, (a, b) in sorted(_completed(lora).items()):
        tensors |= {names.key(module, "A", lora.family): a.to(dtype), names.key(module, "B", lora.family): b.to(dtype)}
        tensors[names.key(module, "alpha", lora.family)] = torch.tensor([float(lora.rank)])
    values = {
        "general.name": about.name,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(lora.rank),
        "adapter.run": about.run,
        "adapter.trainer": "gguf-trainer",
        "adapter.trainer_version": __version__,
    }
    ours = {key: value for key, value in metadata(lora, about).items() if key.startswith(OURS)}
    export.write(path, sorted(tensors), tensors.__getitem__, values | ours, arch=lora.family.name)


def _completed(lora: Lora) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The modules, with zeros where one is missing that another cannot do without; they are as wide as their input."""
    found = dict(lora.modules)
    for module, other in names.missing(lora.modules, lora.family).items():
        a = lora.modules[other][0]
        found[module] = torch.zeros_like(a), a.new_zeros(a.shape[1], a.shape[0])
    return found


def metadata(lora: Lora, about: About) -> dict[str, str]:
    """What the file says of itself, in keys that people's tools read and in our own."""
    family, rank = lora.family, lora.rank
    values = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": family.architecture,
        "modelspec.implementation": "diffusers",
        "modelspec.title": about.name,
        "modelspec.resolution": f"{about.resolution}x{about.resolution}",
        "modelspec.prediction_type": about.prediction,
        "modelspec.trigger_phrase": about.trigger,
        "ss_network_module": "networks.lora",
        "ss_network_dim": rank,
        "ss_network_alpha": rank,
        "ss_base_model_version": _BASE_VERSIONS[family.name],
        "ss_sd_model_name": about.base,
        "ss_output_name": about.name,
        "ss_steps": about.steps,
        "ss_max_train_steps": about.planned_steps,
        "ss_resolution": f"({about.resolution}, {about.resolution})",
        "ss_num_train_images": about.pictures,
        "ss_training_comment": about.trigger,
    }
    ours = asdict(about) | {"family": family.name, "rank": rank, "version": __version__}
    values |= {OURS + key: value for key, value in ours.items()}
    return {key: str(value) for key, value in sorted(values.items()) if value is not None}


def _adapter(lora: Lora) -> str:
    """What diffusers makes its LoRA layers by. The modules have their whole names: an end could fit more of them."""
    values = {
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "target_modules": sorted(lora.modules),
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "lora_dropout": 0.0,
        "use_dora": False,
    }
    return json.dumps({f"{lora.family.part}.{key}": value for key, value in values.items()}, sort_keys=True)


def _write(path: Path, tensors: Tensors, values: dict[str, str], run: str) -> None:
    refuse_anothers(path, run)
    with written_whole(path) as aside:
        write_safetensors(aside, tensors, values)
        back, _ = read(aside)
        if back.keys() != tensors.keys() or any(not torch.equal(back[name], tensors[name]) for name in tensors):
            raise TrainerError(f"{path} read back differently than it was written: check the disk and export again")


def write_safetensors(path: Path, tensors: Tensors, values: Mapping[str, str]) -> None:
    """Write a safetensors file in its one canonical form: metadata sorted, tensors by size of value, then by name.

    The library keeps metadata in an order that changes from process to process.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(values.items()))}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sidecar(path: Path) -> Path:
    """Where the JSON beside a LoRA file is."""
    return path.with_suffix(".json")


def write_sidecar(path: Path, lora: Lora, about: About, files: Iterable[Path]) -> None:
    """Write the JSON beside a LoRA file, by which programs that list LoRAs say what each is for.

    Args:
        path: the file for diffusers.
        lora: what is in it.
        about: what it says of itself.
        files: all that were written of it.

    Raises:
        TrainerError: there is one of another run.
    """
    out = sidecar(path)
    if out.exists() and (owner := _owner_of_sidecar(out)) != about.run:
        raise _anothers(out, owner, about.run)
    value = {
        "family": lora.family.name,
        "families": [lora.family.name],
        "base_model": about.base,
        "base_sha256": about.base_sha256,
        "dataset_sha256": about.dataset_sha256,
        "settings_sha256": about.settings_sha256,
        "lora_rank": lora.rank,
        "lora_alpha": lora.rank,
        "trained_alpha": about.alpha,
        "modules": len(lora.modules),
        "live_modules": len(lora.modules) - about.dead,
        "steps": about.steps,
        "planned_steps": about.planned_steps,
        "checkpoint": about.checkpoint,
        "resolution": about.resolution,
        "trigger_prompt": about.trigger,
        "name": about.name,
        "run": about.run,
        "source": f"gguf-trainer {__version__}",
        "files": [{"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)} for file in files],
    }
    write_json(out, value)


def _owner_of_sidecar(path: Path) -> str | None:
    try:
        value = read_json(path)
    except TrainerError:
        return None
    return value.get("run") if isinstance(value, dict) else None


def refuse_anothers(path: Path, run: str) -> None:
    """Stop if a LoRA file is there and another run's. A broken file is nobody's.

    Raises:
        TrainerError: it is.
    """
    if not path.exists():
        return
    try:
        _, values = safetensors_files.header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if (owner := values.get(OURS + "run")) != run:
        raise _anothers(path, owner, run)


def _anothers(path: Path, owner: str | None, run: str) -> TrainerError:
    whose = f"run {owner}" if owner else "another program"
    return TrainerError(
        f"{path} belongs to {whose}, not to run {run}: nothing was written; set export.name or export.dir to something "
        "else"
    )


# --- reading --------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a safetensors LoRA.

    Raises:
        TrainerError: it is missing, truncated or not a safetensors file.
    """
    stored, values = header(path)
    tensors = {}
    with open(path, "rb") as file:
        for name, entry in stored.items():
            if entry.dtype is None:
                raise TrainerError(f"{path} has values of a kind that no LoRA has, in {name}: get it again")
            data = bytearray(entry.bytes)
            safetensors_files.read(file.fileno(), entry.start, memoryview(data))
            # A tensor cannot be made of no bytes at all.
            flat = torch.frombuffer(data, dtype=entry.dtype) if data else torch.empty(0, dtype=entry.dtype)
            tensors[name] = flat.reshape(entry.shape)
    return tensors, values


def header(path: Path) -> tuple[dict[str, safetensors_files.Stored], dict[str, str]]:
    """Where the tensors of a safetensors LoRA are, and its metadata.

    Raises:
        TrainerError: it is missing, truncated or not a safetensors file.
    """
    try:
        return safetensors_files.header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainerError(f"{path} is not a whole safetensors file ({reason}): export or get it again") from None


@dataclass(frozen=True)
class Contents:
    """What is in a LoRA file, in numbers.

    bytes: of the file; header: of those, before the tensors; payload: that all values of its shapes take.
    modules: those with a `lora_B`; live: those of them whose `lora_B` has a value other than 0.
    finite: whether all values are. rank: the largest. norm: of all products `lora_B` @ `lora_A` together.
    """

    tensors: int
    bytes: int
    header: int
    payload: int
    modules: tuple[str, ...]
    live: tuple[str, ...]
    finite: bool
    rank: int
    norm: float

    @property
    def whole(self) -> bool:
        """Whether the file's size is its header and its values, and each module has its two tensors."""
        return self.bytes == self.header + self.payload and self.tensors == 2 * len(self.modules)


def contents(path: Path, family: Family) -> Contents:
    """What is in a LoRA file for diffusers.

    Raises:
        TrainerError: it is missing or damaged, or a key of it is none of the family's.
    """
    tensors, _ = read(path)
    a: Tensors = {}
    b: Tensors = {}
    for key, tensor in tensors.items():
        found = names.parse(key, family, "diffusers")
        if found is None:
            raise TrainerError(f"{path} has the key {key}, which {family.title} does not know: export it again")
        if found.holds != "alpha":
            (a if found.holds == "A" else b)[found.module] = tensor.float()
    square = sum(float(_product_square(a[module], b[module])) for module in b if module in a)
    with open(path, "rb") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
    return Contents(
        tensors=len(tensors),
        bytes=path.stat().st_size,
        header=head,
        payload=sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()),
        modules=tuple(sorted(b)),
        live=tuple(sorted(module for module, tensor in b.items() if tensor.any())),
        finite=all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()),
        rank=max((tensor.shape[0] for tensor in a.values()), default=0),
        norm=square**0.5,
    )


def _product_square(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The squared norm of `b @ a` from two rank x rank matrices: the product itself would be as large as the base."""
    return ((b.double().T @ b.double()) * (a.double() @ a.double().T)).sum().clamp(min=0)


def dead(family: Family, modules: Iterable[str], blocks: int) -> set[str]:
    """Modules of a LoRA whose output nothing reads, so that they never learn: their `lora_B` stays 0.

    Args:
        family: of the network.
        modules: of the LoRA.
        blocks: that the network has (`num_layers` of its config).
    """
    return set(modules) & {name.format(last=blocks - 1) for name in family.dead}
