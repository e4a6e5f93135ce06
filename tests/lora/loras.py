"""LoRAs that were trained for some steps on the tiny pipelines, and what was measured while they were."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import tiny_pipelines
import torch
from peft import LoraConfig, get_peft_model_state_dict
from trainer.lora import evaluation, families, files, models, objective
from trainer.lora.ladder import Course, Gradients

FAMILIES = tuple(families.names())
RANK = 8
CAPTION = "a photo of sks fox"
CPU = torch.device("cpu")
ABOUT = files.About(
    name="fox",
    run="fox",
    alpha=16.0,
    base="tiny/base",
    base_sha256="b" * 64,
    dataset_sha256="d" * 64,
    settings_sha256="5" * 64,
    steps=20,
    planned_steps=500,
    checkpoint="best",
    resolution=64,
    pictures=1,
    trigger=CAPTION,
)
_PLACE = tempfile.TemporaryDirectory(prefix="loras-")


class Trained(NamedTuple):
    """Weights after each kept step, as they are trained; losses, norms and vals by band; gradients of step 1."""

    weights: dict[int, dict[str, torch.Tensor]]
    course: Course
    vals: dict[int, list[float]]
    gradients: Gradients


@cache
def folder(family: str) -> Path:
    return tiny_pipelines.save(family, Path(_PLACE.name) / family)


@cache
def pipeline(family: str) -> Any:
    """The one pipeline of a family: whoever puts a LoRA on it takes it off."""
    made = getattr(diffusers, families.get(family).pipeline).from_pretrained(folder(family), local_files_only=True)
    made.set_progress_bar_config(disable=True)
    return made


def network(family: str) -> Any:
    return getattr(pipeline(family), families.get(family).part)


def arguments(family: str, prompt: str = CAPTION) -> dict[str, Any]:
    """How a pipeline is asked for a picture, at a size and number of steps that take little."""
    asked = {"prompt": prompt, "num_inference_steps": 2, "height": 64, "width": 64}
    return asked | {"true_cfg_scale" if family == "qwen_image" else "guidance_scale": 1.0}


@cache
def trained(family: str, alpha: float = 16.0, steps: int = 20) -> Trained:
    """Train on one picture's latents; kept are the weights after 1 step and at the end."""
    its, model = families.get(family), models.of(folder(family))
    net = model.network(torch.float32, CPU)
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules=list(its.targets), init_lora_weights="gaussian")
    net.add_adapter(config, adapter_name="x")
    (conditions,) = model.text_encoder(torch.float32, CPU).encode([CAPTION])
    schedule = model.noise_schedule()
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(1, its.latent_channels, 8, 8, generator=generator)
    time_ids = torch.tensor([[64, 64, 0, 0, 64, 64]]) if family == "sdxl" else None

    def loss(level: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        t = schedule.timesteps(level, (8, 8))
        noise = torch.randn(latents.shape, generator=generator)
        predicted = model.predict(net, schedule.noisy(latents, noise, t), t, [conditions], time_ids)
        return objective.loss(predicted, schedule.target(latents, noise, t)).mean()

    @torch.no_grad()
    def val() -> list[float]:
        fixed = torch.Generator().manual_seed(123)
        return [loss(torch.tensor([band]), fixed).item() for band in objective.BANDS]

    learnt = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(learnt.values(), lr=5e-3)
    vals, weights, losses, norms, gradients = {0: val()}, {}, [], [], None
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value = loss(objective.levels(1, its.timesteps, generator), generator)
        value.backward()
        if gradients is None:
            gradients = evaluation.gradients(net)
        norms.append(torch.nn.utils.clip_grad_norm_(learnt.values(), 1.0).item())
        losses.append(value.item())
        optimizer.step()
        if step in (1, steps):
            vals[step] = val()
            state = get_peft_model_state_dict(net, adapter_name="x")
            weights[step] = {name: tensor.detach().clone() for name, tensor in state.items()}
    return Trained(weights, Course(losses, norms, vals[0], vals[steps]), vals, gradients)


def weights(family: str, alpha: float = 16.0) -> dict[str, torch.Tensor]:
    """After 20 steps: `<module>.lora_A.weight` [8, in] and `<module>.lora_B.weight` [out, 8], f32."""
    return trained(family, alpha).weights[20]


def lora(family: str, alpha: float = 16.0, dtype: torch.dtype = torch.float32) -> files.Lora:
    return files.folded(weights(family, alpha), families.get(family), alpha, dtype)
