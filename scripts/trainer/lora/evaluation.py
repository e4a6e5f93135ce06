"""A LoRA file seen through its pipeline: pictures of the base and of the LoRA from the same seeds, and their grid.

Pictures are f32 [height, width, 3] of 0..1. Noise is drawn on the CPU, so that seeds mean the same on every device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from trainer.errors import TrainerError
from trainer.files import written_whole
from trainer.lora import families, files, ladder, loading
from trainer.lora.families import Family
from trainer.lora.models.base import Conditions, TextEncoder, Vae

Picture = np.ndarray

_CELL = 256  # pixels, the most that a picture of a grid takes
_LABEL = 18  # pixels


@dataclass(frozen=True)
class Shot:
    """A picture to ask for; `learnt`: whether the prompt has what the LoRA was trained on."""

    prompt: str
    seed: int
    learnt: bool = True


def draw(pipeline: Any, shot: Shot, options: Mapping[str, Any]) -> Picture:
    """A picture; `options` are the pipeline's (steps, guidance, height, width)."""
    generator = torch.Generator().manual_seed(shot.seed)
    with torch.inference_mode():
        result = pipeline(prompt=shot.prompt, generator=generator, output_type="np", **options)
    return np.asarray(result.images[0], np.float32)


@dataclass(frozen=True)
class Compared:
    """Pictures of the base and of the LoRA by shot, and what was measured of them."""

    base: list[Picture]
    lora: list[Picture]
    shifts: list[float]
    pictures: ladder.Pictures
    inert: ladder.Rung


def compare(
    pipeline: Any,
    path: Path,
    weights: dict[str, torch.Tensor],
    alpha: float,
    shots: Sequence[Shot],
    options: Mapping[str, Any],
) -> Compared:
    """The base's pictures against the LoRA's, and the file's against those of the weights it was made of.

    The pipeline has no LoRA before, and none after.

    Args:
        pipeline: of diffusers, of the file's family.
        path: the file for diffusers.
        weights: as they are trained, `<module>.lora_A.weight` and `<module>.lora_B.weight`, f32.
        alpha: that they are trained with.
        shots: pictures to compare, one of something learnt at least.
        options: of the pipeline.

    Raises:
        TrainerError: the file cannot be loaded.
    """
    network = getattr(pipeline, families.of_pipeline(type(pipeline).__name__).part)
    first = shots[0]

    def drawn() -> Picture:
        return draw(pipeline, first, options)

    def of_weights(weights: dict[str, torch.Tensor]) -> Picture:
        loading.attach(network, weights, alpha)
        try:
            return drawn()
        finally:
            pipeline.unload_lora_weights()

    base = [draw(pipeline, shot, options) for shot in shots]
    floor = _change(drawn(), base[0])
    zeros = {name: torch.zeros_like(it) if ".lora_B." in name else it for name, it in weights.items()}
    untrained, trained = of_weights(zeros), of_weights(weights)
    loading.load(pipeline, path)
    try:
        lora = [draw(pipeline, shot, options) for shot in shots]
        pipeline.set_adapters(loading.NAME, 0.0)
        at_0 = drawn()
        pipeline.set_adapters(loading.NAME, 1.0)
        pipeline.disable_lora()
        disabled = drawn()
    finally:
        pipeline.unload_lora_weights()
    unloaded = drawn()
    shifts = [_change(one, other) for one, other in zip(lora, base, strict=True)]
    by_kind = {
        learnt: [shift for shift, shot in zip(shifts, shots, strict=True) if shot.learnt is learnt]
        for learnt in (True, False)
    }
    return Compared(
        base=base,
        lora=lora,
        shifts=shifts,
        pictures=ladder.Pictures(
            floor=floor,
            shift=fmean(by_kind[True]),
            reload=_largest(lora[0], trained),
            spread=min(float(one.std()) / max(float(other.std()), 1e-9) for one, other in zip(lora, base, strict=True)),
            other=fmean(by_kind[False]) if by_kind[False] else None,
        ),
        inert=ladder.inert(*(_largest(it, base[0]) for it in (untrained, at_0, disabled, unloaded))),
    )


def _change(one: Picture, other: Picture) -> float:
    """Mean absolute difference."""
    return float(np.abs(one - other).mean())


def _largest(one: Picture, other: Picture) -> float:
    return float(np.abs(one - other).max())


def closer(vae: Vae, reference: torch.Tensor, base: Iterable[Picture], lora: Iterable[Picture]) -> float:
    """Share of seeds whose LoRA picture is closer to a training picture than the base's: cosine of VAE means.

    `reference`: the mean of the training picture's latents [C, h, w], of pictures of the same size.
    """
    rows = [(_cosine(vae, it, reference), _cosine(vae, was, reference)) for it, was in zip(lora, base, strict=True)]
    return fmean(after > before for after, before in rows)


def _cosine(vae: Vae, picture: Picture, reference: torch.Tensor) -> float:
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None] * 2 - 1
    mean, _ = vae.encode(pixels)
    return torch.cosine_similarity(mean[0].flatten().cpu(), reference.flatten().float().cpu(), dim=0).item()


# --- what should not change -----------------------------------------------------------------------------------------


def expected(
    family: Family, network: nn.Module, modules: Iterable[str], rank: int, dtype: torch.dtype
) -> ladder.Expected:
    """What the file of a LoRA on these modules of a network has to hold."""
    modules = list(modules)
    layers = [network.get_submodule(module) for module in modules]
    shapes = [(layer.out_features, layer.in_features) for layer in layers]
    dead = files.dead(family, modules, getattr(network.config, "num_layers", 0)) if family.dead else set()
    return ladder.Expected(len(modules), len(modules) - len(dead), files.payload_bytes(shapes, rank, dtype))


def not_constant(conditions: Conditions) -> list[str]:
    """Names of conditions that training could change, or that keep more than themselves in memory: none should."""
    return [
        name
        for name, tensor in conditions.items()
        if tensor.requires_grad
        or tensor.grad_fn is not None
        or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.dtype.itemsize
    ]


def encoded_apart(encoder: TextEncoder, kept: Mapping[str, Conditions]) -> float:
    """Largest difference between conditions that were kept, by caption, and what the encoder makes of them now.

    0: tokenizer, template and encoder are those that the shards were made with.
    """
    found = encoder.encode(list(kept))
    worst = 0.0
    for now, before in zip(found, kept.values(), strict=True):
        if now.keys() != before.keys() or any(now[name].shape != before[name].shape for name in now):
            return float("inf")
        worst = max(worst, *((now[name].float() - before[name].float()).abs().max().item() for name in now))
    return worst


def conditions(
    encoder: TextEncoder, kept: Mapping[str, Conditions], trained_on: str, evaluated_on: str, limit: float = 0.0
) -> ladder.Rung:
    """The rung of what training was given by the shards, by caption: as `ladder.conditions`."""
    changing = sorted({name for found in kept.values() for name in not_constant(found)})
    return ladder.conditions(changing, encoded_apart(encoder, kept), trained_on, evaluated_on, limit)


def gradients(network: nn.Module) -> ladder.Gradients:
    """What the first backward pass left on a network with a fresh LoRA."""
    grads = {name: weight.grad for name, weight in network.named_parameters()}
    some = {name for name, grad in grads.items() if grad is not None and bool(grad.any())}
    return ladder.Gradients(
        a_zero=sum(".lora_A." in name and name not in some for name in grads),
        b_nonzero=sum(".lora_B." in name for name in some),
        base=sum(".lora_" not in name and grad is not None for name, grad in grads.items()),
    )


def attention(network: nn.Module) -> str:
    """What the attention of a network is computed by: its processors, and the backend of those that have a choice."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    kinds = sorted({type(it.processor).__name__ for it in network.modules() if hasattr(it, "processor")})
    backend, _ = _AttentionBackendRegistry.get_active_backend()
    return f"{', '.join(kinds)}; {backend.value}"


# --- pictures for people --------------------------------------------------------------------------------------------


def save(picture: Picture, out: Path) -> None:
    """Write a picture as PNG."""
    _save(_image(picture), out)


def _save(image: Image.Image, out: Path) -> None:
    with written_whole(out) as aside:
        image.save(aside, "PNG")


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray((np.nan_to_num(picture).clip(0, 1) * 255).round().astype(np.uint8))


def grid(columns: Sequence[str], rows: Sequence[str], pictures: Sequence[Sequence[Picture]], out: Path) -> None:
    """Write pictures, by row and column, as one PNG with their names."""
    images = [[_image(picture) for picture in row] for row in pictures]
    for image in (image for row in images for image in row):
        image.thumbnail((_CELL, _CELL), Image.Resampling.LANCZOS)
    width = max(64, *(image.width for row in images for image in row))
    heights = [_LABEL + max(image.height for image in row) for row in images]
    sheet = Image.new("RGB", (width * len(columns), _LABEL + sum(heights)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, name in enumerate(columns):
        pen.text((number * width + 3, 3), _plain(name), "black", font)
    top = _LABEL
    for name, row, height in zip(rows, images, heights, strict=True):
        pen.text((3, top + 3), _plain(name)[: width * len(columns) // 6], "gray", font)
        for number, image in enumerate(row):
            sheet.paste(image, (number * width, top + _LABEL))
        top += height
    _save(sheet, out)


def _plain(text: str) -> str:
    """What Pillow's own font has of a text."""
    return text.encode("latin-1", "replace").decode("latin-1")


def over_steps(
    pipeline: Any, kept: Sequence[tuple[int, Path]], shots: Sequence[Shot], options: Mapping[str, Any]
) -> list[list[Picture]]:
    """Pictures by shot, of each kept step's file in turn.

    Raises:
        TrainerError: a file cannot be loaded.
    """
    columns = []
    for _, path in kept:
        loading.load(pipeline, path)
        try:
            columns.append([draw(pipeline, shot, options) for shot in shots])
        finally:
            pipeline.unload_lora_weights()
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in shots]


# --- all of it ------------------------------------------------------------------------------------------------------


def evaluate(
    pipeline: Any,
    path: Path,
    weights: dict[str, torch.Tensor],
    alpha: float,
    shots: Sequence[Shot],
    options: Mapping[str, Any],
    wanted: ladder.Expected,
    out: Path,
    kept: Sequence[tuple[int, Path]] = (),
) -> tuple[dict[str, Any], list[ladder.Rung]]:
    """Compare, draw and count.

    Args:
        pipeline: as for `compare`.
        path: as for `compare`.
        weights: as for `compare`.
        alpha: as for `compare`.
        shots: as for `compare`.
        options: as for `compare`.
        wanted: of the file.
        out: folder of the pictures: base-<n>.png, lora-<n>.png and diff-<n>.png of shot n, and grid.png.
        kept: files of earlier steps, for the grid.

    Returns:
        What the report shows, and the rungs `inert`, `compare` and `weights`.

    Raises:
        TrainerError: a file cannot be loaded, or is damaged.
    """
    family = families.of_pipeline(type(pipeline).__name__)
    if family is None:
        raise TrainerError(f"{type(pipeline).__name__} is of no family that LoRAs are trained for here")
    contents = files.contents(path, family)
    stored, values = files.header(path)
    dtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[next(iter(stored.values())).dtype]
    compared = compare(pipeline, path, weights, alpha, shots, options)
    listed = []
    for number, (shot, base, lora) in enumerate(zip(shots, compared.base, compared.lora, strict=True)):
        difference = np.abs(lora - base)
        files_of = {"base": base, "lora": lora, "diff": difference / max(float(difference.max()), 1e-9)}
        for name, picture in files_of.items():
            save(picture, out / f"{name}-{number}.png")
        named = {name: f"{name}-{number}.png" for name in files_of}
        listed.append(asdict(shot) | {"shift": compared.shifts[number]} | named)
    steps = int(values[files.OURS + "steps"])
    between = over_steps(pipeline, kept, shots, options)
    rows = [[base, *row, lora] for base, row, lora in zip(compared.base, between, compared.lora, strict=True)]
    columns = ["base", *(f"step {step}" for step, _ in kept), f"step {steps}"]
    grid(columns, [f"{shot.prompt} ({shot.seed})" for shot in shots], rows, out / "grid.png")
    content = {
        "family": family.name,
        "file": path.name,
        "dtype": dtype,
        "steps": steps,
        "options": dict(options),
        "shots": listed,
        "grid": "grid.png",
        "columns": columns,
        "modules": {"file": len(contents.modules), "live": len(contents.live), "expected_live": wanted.live},
        "attention": attention(getattr(pipeline, family.part)),
    }
    content |= {key: value for key, value in asdict(compared.pictures).items() if value is not None}
    device = "cuda" if pipeline.device.type == "cuda" else "cpu"
    rungs = [
        compared.inert,
        ladder.compare(compared.pictures, dtype, device, steps),
        ladder.weights(contents, wanted),
    ]
    return content, rungs
