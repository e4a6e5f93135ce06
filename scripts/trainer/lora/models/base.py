"""What the models of all families have in common.

A model is a folder in the layout of diffusers, of which each part is loaded alone: text encoders, VAE and network are
never in memory together unless someone holds them together. Parts are read from safetensors files of that folder
only, by the classes of the family whatever the folder's files say, so nothing is fetched and no code of it is run.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.errors import TrainerError
from trainer.lora.families import Family
from trainer.lora.objective import Diffusion, Flow

Conditions = dict[str, Tensor]
"""What a network takes of one caption, unpadded; the names and shapes are told by each family's module."""

_Part = TypeVar("_Part")


class TextEncoder(ABC):
    """The tokenizers and text encoders of a model, used by the code of its pipeline."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self.pipeline, self.device = pipeline, device

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Conditions]:
        """The conditions of captions, in the encoders' number type, on the CPU.

        Each caption is encoded by itself: its bits depend on no other one.
        """
        return [
            {name: tensor[0].detach().cpu().clone().contiguous() for name, tensor in self._encode(caption).items()}
            for caption in captions
        ]

    def length(self, caption: str) -> tuple[int, int]:
        """How many tokens a caption has, and how many of them the encoder takes."""
        wanted, limit = self._length(caption)
        return wanted, min(wanted, limit)

    @abstractmethod
    def _encode(self, caption: str) -> Conditions:
        """Conditions of one caption, each with a first dimension of 1."""

    @abstractmethod
    def _length(self, caption: str) -> tuple[int, int]:
        """Tokens of a caption, and the most that the encoder takes."""


class Vae:
    """A VAE in f32, between pixels [B, 3, H, W] of -1..1 and latents [B, C, h, w] as the network takes them.

    Latents are (what the VAE gives - shift) * scale.
    """

    def __init__(self, vae: Any, shift: Tensor, scale: Tensor, device: torch.device) -> None:
        """`shift` and `scale`: one number, or one for each of the channels."""
        self.vae = vae.to(device)
        self.shift, self.scale = (it.float().to(device).view(1, -1, 1, 1) for it in (shift, scale))

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents of pictures, f32 [B, C, h, w] each.

        Each picture is encoded by itself: its bits depend on no other one.
        """
        means, stds = zip(*(self._posterior(picture[None].to(self.shift)) for picture in pixels), strict=True)
        return (torch.cat(means) - self.shift) * self.scale, torch.cat(stds) * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of -1..1, f32, of latents."""
        return torch.cat([self._pixels(it[None]) for it in latents.to(self.shift) / self.scale + self.shift])

    def _posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        posterior = self.vae.encode(pixels).latent_dist
        return posterior.mean, posterior.std

    def _pixels(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents, return_dict=False)[0].clamp(-1, 1)


class Model(ABC):
    """A model of one family: the folder of a pipeline of diffusers."""

    family: ClassVar[Family]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """The text encoders."""

    @abstractmethod
    def vae(self, device: torch.device) -> Vae:
        """The VAE, f32 whatever its files are: in f16 it overflows."""

    @abstractmethod
    def predict(
        self,
        network: nn.Module,
        noisy: Tensor,
        t: Tensor,
        conditions: Sequence[Conditions],
        time_ids: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """What the network says of noisy latents: what the objective's target is compared with.

        Args:
            network: that of `network()`, perhaps with a LoRA on it, or inside a wrapper.
            noisy: latents with noise, f32 [B, C, h, w]; h and w are even.
            t: timesteps as the objective gives them, f32 [B].
            conditions: of one caption each; here they are padded to each other's length, and padding is masked.
            time_ids: [B, 6], SDXL only: height and width of the picture, top and left of the crop, height and width
                of what was asked for, in pixels.
            guidance: FLUX only, where the network has a distilled guidance.

        Returns:
            f32 [B, C, h, w].
        """

    @abstractmethod
    def noise_schedule(self, *, flow_shift: float | None = None, snr_gamma: float = 0.0) -> Diffusion | Flow:
        """How noise is added, by the scheduler's config.

        Args:
            flow_shift: the shift in place of the scheduler's own; None is the schedule the pipeline generates by.
            snr_gamma: gamma of min-SNR weights; 0: none.

        Raises:
            TrainerError: the scheduler or the arguments do not go with this family.
        """

    def network(self, dtype: torch.dtype, device: torch.device, quantization: Any = None) -> nn.Module:
        """The transformer or U-Net alone, frozen, in eval mode.

        Args:
            dtype: of weights; where they are quantized, of computing.
            device: where it is put (where it is quantized, quantizing may have put it there before).
            quantization: a config of diffusers to quantize it by while it is loaded.
        """
        import diffusers

        extra = {} if quantization is None else {"quantization_config": quantization}
        network = self.load(getattr(diffusers, self.family.network), self.family.part, torch_dtype=dtype, **extra)
        return network.to(device).requires_grad_(False).eval()

    def config(self, part: str, name: str = "config.json") -> dict[str, Any]:
        """The config of a part.

        Raises:
            TrainerError: it cannot be read.
        """
        path = self.folder / part / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainerError(f"{path} cannot be read ({error}): fetch the model again") from error

    def load(self, kind: type[_Part], part: str, **settings: Any) -> _Part:
        """A part of the pipeline, by its class's from_pretrained.

        Raises:
            TrainerError: a file of it is missing or damaged.
        """
        folder = self.folder / part
        weights = [path.name for path in folder.glob("*.safetensors")]
        if weights and all(".fp16" in name for name in weights):
            settings["variant"] = "fp16"
        try:
            return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, **settings)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise TrainerError(f"{folder} cannot be loaded as {kind.__name__} ({reason}): fetch it again") from error

    def tokenizer(self, kind: type[_Part], part: str) -> _Part:
        """A tokenizer of the pipeline.

        Raises:
            TrainerError: it is of another class than the family's, or has tokens that its text encoder has not, or a
                file is missing or damaged.
        """
        named = str(self.config(part, "tokenizer_config.json").get("tokenizer_class", kind.__name__))
        if named.removesuffix("Fast") != kind.__name__:
            raise TrainerError(
                f"{self.folder / part} is a {named}, and {self.family.title} has a {kind.__name__}: fetch it again"
            )
        tokenizer = self.load(kind, part)
        encoder = self.config(part.replace("tokenizer", "text_encoder"))
        rows = encoder.get("text_config", encoder)["vocab_size"]
        if len(tokenizer) > rows:
            raise TrainerError(
                f"{self.folder / part} has {len(tokenizer)} tokens and its text encoder {rows}, so it is of another "
                "model: fetch it again"
            )
        return tokenizer


class FlowModel(Model):
    """A model that learns by flow matching."""

    def noise_schedule(self, *, flow_shift: float | None = None, snr_gamma: float = 0.0) -> Flow:
        """The flow of the scheduler's config."""
        if snr_gamma:
            raise TrainerError(
                f"lora.snr_gamma weights noise prediction, and {self.family.title} has none: leave it out"
            )
        return Flow(self.config("scheduler", "scheduler_config.json"), flow_shift)


def dtype_of(network: nn.Module) -> torch.dtype:
    """The number type that a network takes latents in: that of its first weights that are not quantized."""
    return next(it.dtype for it in network.parameters() if it.is_floating_point())


def stacked(conditions: Sequence[Conditions], name: str, network: nn.Module, device: torch.device) -> Tensor:
    """One of the tensors of conditions, which all have one shape, in the network's number type."""
    return torch.stack([it[name] for it in conditions]).to(device, dtype_of(network))


def packed(latents: Tensor) -> Tensor:
    """Latents [B, C, h, w] as patches of 2 x 2, [B, h/2 * w/2, C * 4]."""
    patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, h/2, 2, w/2, 2]
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(patches: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, height, width] of patches: what `packed` was given."""
    grid = patches.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))  # [B, h/2, w/2, C, 2, 2]
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), -1, height, width)
