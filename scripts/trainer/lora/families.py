"""The families of diffusion models that a LoRA can be trained for: facts, by name. Light to import.

What depends on weights or on their classes is in `trainer.lora.models`.
"""

from dataclasses import dataclass
from typing import Literal

Name = Literal["sdxl", "flux", "qwen_image", "z_image"]
Timesteps = Literal["uniform", "logit_normal"]
# Of the ladder: steps after which training is judged.
RUNGS = (1, 20, 100, 500)


@dataclass(frozen=True)
class Family:
    """One family.

    pipeline, network: the classes of diffusers that model_index.json names, and the network's folder and prefix of its
        tensors in LoRA files.
    text_encoders: folders of the text encoders; their tokenizers are beside them.
    targets: ends of the names of the modules that get a LoRA; mlp: further ones of `lora.targets: [attn-mlp]`.
    dead: modules that are targets, and whose output nothing reads, by the network's config; `{last}` is the number of
        the last block.
    latent_channels: of the VAE. posterior: what latents are trained on, samples of the VAE's posterior or its mode.
    time_ids: whether the network is told sizes and the place of the crop.
    resolution: pixels a side that training starts from.
    step: pixels that the sides of a picture are a multiple of: of the VAE's scale and the network's patches.
    text_tokens: that the encoder takes of a caption.
    bf16_only: values inside the network are too large for f16.
    objective: `diffusion`: noise or velocity, as the scheduler says; `flow`: noise less latents.
    timesteps, flow_shift, snr_gamma, text_dropout: defaults of the settings of the same names.
    architecture: of modelspec.architecture in LoRA files.
    repository, gigabytes: of the usual base, and of its network in bf16.
    gated: whether its license has to be accepted first.
    """

    name: Name
    title: str
    pipeline: str
    network: str
    part: Literal["unet", "transformer"]
    text_encoders: tuple[str, ...]
    targets: tuple[str, ...]
    mlp: tuple[str, ...]
    latent_channels: int
    resolution: int
    text_tokens: int
    objective: Literal["diffusion", "flow"]
    timesteps: Timesteps
    flow_shift: Literal["auto"] | None
    snr_gamma: float
    text_dropout: float
    architecture: str
    repository: str
    gigabytes: float
    posterior: Literal["sample", "mode"] = "sample"
    time_ids: bool = False
    dead: tuple[str, ...] = ()
    step: int = 16
    bf16_only: bool = False
    gated: bool = False


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

_FAMILIES = (
    Family(
        name="sdxl",
        title="SDXL",
        pipeline="StableDiffusionXLPipeline",
        network="UNet2DConditionModel",
        part="unet",
        text_encoders=("text_encoder", "text_encoder_2"),
        targets=_ATTENTION,
        mlp=("ff.net.0.proj", "ff.net.2"),
        latent_channels=4,
        resolution=1024,
        text_tokens=77,
        objective="diffusion",
        timesteps="uniform",
        flow_shift=None,
        snr_gamma=5.0,
        text_dropout=0.05,
        architecture="stable-diffusion-xl-v1-base/lora",
        repository="stabilityai/stable-diffusion-xl-base-1.0",
        gigabytes=5.13,
        time_ids=True,
        step=8,
    ),
    Family(
        name="flux",
        title="FLUX.1",
        pipeline="FluxPipeline",
        network="FluxTransformer2DModel",
        part="transformer",
        text_encoders=("text_encoder", "text_encoder_2"),
        targets=_ATTENTION + _JOINT,
        mlp=("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"),
        latent_channels=16,
        resolution=512,
        text_tokens=512,
        objective="flow",
        timesteps="logit_normal",
        flow_shift="auto",
        snr_gamma=0.0,
        text_dropout=0.0,  # guidance is distilled into it
        architecture="flux-1-dev/lora",
        repository="black-forest-labs/FLUX.1-dev",
        gigabytes=23.8,
        gated=True,
    ),
    Family(
        name="qwen_image",
        title="Qwen-Image",
        pipeline="QwenImagePipeline",
        network="QwenImageTransformer2DModel",
        part="transformer",
        text_encoders=("text_encoder",),
        targets=_ATTENTION + _JOINT,
        mlp=("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        latent_channels=16,
        resolution=512,
        text_tokens=1024,
        objective="flow",
        timesteps="logit_normal",
        flow_shift="auto",
        snr_gamma=0.0,
        text_dropout=0.05,
        architecture="qwen-image/lora",
        repository="Qwen/Qwen-Image",
        gigabytes=40.86,
        dead=("transformer_blocks.{last}.attn.add_q_proj", "transformer_blocks.{last}.attn.to_add_out"),
        bf16_only=True,
    ),
    Family(
        name="z_image",
        title="Z-Image",
        pipeline="ZImagePipeline",
        network="ZImageTransformer2DModel",
        part="transformer",
        text_encoders=("text_encoder",),
        targets=_ATTENTION,
        mlp=("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        latent_channels=16,
        resolution=768,
        text_tokens=512,
        objective="flow",
        timesteps="logit_normal",
        flow_shift=None,  # its scheduler's table is shifted already
        snr_gamma=0.0,
        text_dropout=0.0,
        architecture="z-image/lora",
        repository="Tongyi-MAI/Z-Image",
        gigabytes=12.31,
        posterior="mode",
        bf16_only=True,
    ),
)
_BY_NAME = {family.name: family for family in _FAMILIES}
_BY_PIPELINE = {family.pipeline: family for family in _FAMILIES}


def names() -> list[str]:
    """Names of all families."""
    return list(_BY_NAME)


def get(name: str) -> Family:
    """The family of that name (a KeyError is a bug: settings are checked first)."""
    return _BY_NAME[name]


def of_pipeline(name: str) -> Family | None:
    """The family that a class of diffusers belongs to; None of any other class."""
    return _BY_PIPELINE.get(name)
