"""SDXL: a U-Net that predicts noise or velocity. Conditions: embeds [77, 2048], pooled [1280]."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from trainer.errors import TrainerError
from trainer.lora import families
from trainer.lora.models import base
from trainer.lora.models.base import Conditions, dtype_of, stacked
from trainer.lora.objective import Diffusion


class TextEncoder(base.TextEncoder):
    """The two CLIP encoders."""

    def _encode(self, caption: str) -> Conditions:
        # The pipeline's own negative conditions are those of the empty caption: zeros, if its config says so.
        embeds, empty, pooled, empty_pooled = self.pipeline.encode_prompt([caption], device=self.device)
        return {"embeds": embeds, "pooled": pooled} if caption else {"embeds": empty, "pooled": empty_pooled}

    def _length(self, caption: str) -> tuple[int, int]:
        tokenizers = (self.pipeline.tokenizer, self.pipeline.tokenizer_2)
        lengths = [len(it(caption, verbose=False).input_ids) for it in tokenizers]
        return max(lengths), min(it.model_max_length for it in tokenizers)


class Model(base.Model):
    """An SDXL pipeline."""

    family = families.get("sdxl")

    def text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """The two CLIP encoders and their tokenizers."""
        pipeline = StableDiffusionXLPipeline(
            vae=None,
            unet=None,
            scheduler=None,
            text_encoder=self.load(CLIPTextModel, "text_encoder", dtype=dtype).to(device),
            text_encoder_2=self.load(CLIPTextModelWithProjection, "text_encoder_2", dtype=dtype).to(device),
            tokenizer=self.tokenizer(CLIPTokenizer, "tokenizer"),
            tokenizer_2=self.tokenizer(CLIPTokenizer, "tokenizer_2"),
            force_zeros_for_empty_prompt=self.config(".", "model_index.json").get("force_zeros_for_empty_prompt", True),
            add_watermarker=False,
        )
        return TextEncoder(pipeline, device)

    def vae(self, device: torch.device) -> base.Vae:
        """The VAE; fine-tunes have a mean and standard deviation of each channel in its config."""
        vae = self.load(AutoencoderKL, "vae", torch_dtype=torch.float32)
        mean = torch.tensor(vae.config.latents_mean or 0.0)
        std = torch.tensor(vae.config.latents_std or 1.0)
        return base.Vae(vae, mean, vae.config.scaling_factor / std, device)

    def predict(
        self,
        network: nn.Module,
        noisy: Tensor,
        t: Tensor,
        conditions: Sequence[Conditions],
        time_ids: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Noise or velocity. Time ids stay f32: in bf16, 1333 would be 1336."""
        if time_ids is None:
            raise ValueError("SDXL takes time ids")
        dtype = dtype_of(network)
        embeds, pooled = (stacked(conditions, name, network, noisy.device) for name in ("embeds", "pooled"))
        added = {"text_embeds": pooled, "time_ids": time_ids.to(noisy.device, torch.float32)}
        return network(noisy.to(dtype), t, encoder_hidden_states=embeds, added_cond_kwargs=added, return_dict=False)[
            0
        ].float()

    def noise_schedule(self, *, flow_shift: float | None = None, snr_gamma: float = 0.0) -> Diffusion:
        """Noise or velocity, by the scheduler's config."""
        if flow_shift is not None:
            raise TrainerError("lora.flow_shift is of models with flow matching, and SDXL has none: leave it out")
        return Diffusion(self.config("scheduler", "scheduler_config.json"), snr_gamma)
