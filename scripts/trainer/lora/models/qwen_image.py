"""Qwen-Image: a transformer that predicts velocity. Conditions: embeds [L, 3584] of Qwen2.5-VL, L up to 1024."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from trainer.lora import families
from trainer.lora.models import base
from trainer.lora.models.base import Conditions, dtype_of, packed, unpacked


class TextEncoder(base.TextEncoder):
    """Qwen2.5-VL, whose last layer says what the caption is after the template's instruction."""

    def _encode(self, caption: str) -> Conditions:
        embeds, _ = self.pipeline.encode_prompt(
            [caption], device=self.device, max_sequence_length=Model.family.text_tokens
        )
        return {"embeds": embeds}

    def _length(self, caption: str) -> tuple[int, int]:
        templated = self.pipeline.prompt_template_encode.format(caption)
        instruction = self.pipeline.prompt_template_encode_start_idx
        return len(self.pipeline.tokenizer(templated, verbose=False).input_ids) - instruction, Model.family.text_tokens


class Vae(base.Vae):
    """A VAE of videos: a picture is one frame."""

    def _posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = super()._posterior(pixels[:, :, None])
        return mean[:, :, 0], std[:, :, 0]

    def _pixels(self, latents: Tensor) -> Tensor:
        return super()._pixels(latents[:, :, None])[:, :, 0]


class Model(base.FlowModel):
    """A Qwen-Image pipeline."""

    family = families.get("qwen_image")

    def text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Qwen2.5-VL and its tokenizer."""
        pipeline = QwenImagePipeline(
            vae=None,
            transformer=None,
            scheduler=None,
            text_encoder=self.load(Qwen2_5_VLForConditionalGeneration, "text_encoder", dtype=dtype).to(device),
            tokenizer=self.tokenizer(Qwen2Tokenizer, "tokenizer"),
        )
        return TextEncoder(pipeline, device)

    def vae(self, device: torch.device) -> Vae:
        """The VAE, each of whose channels has a mean and standard deviation."""
        vae = self.load(AutoencoderKLQwenImage, "vae", torch_dtype=torch.float32)
        mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
        return Vae(vae, mean, 1 / std, device)

    def predict(
        self,
        network: nn.Module,
        noisy: Tensor,
        t: Tensor,
        conditions: Sequence[Conditions],
        time_ids: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Velocity. The mask of the captions is always there: without one, padding would be read."""
        dtype, device = dtype_of(network), noisy.device
        height, width = noisy.shape[2:]
        embeds = [it["embeds"].to(device, dtype) for it in conditions]
        velocity = network(
            hidden_states=packed(noisy.to(dtype)),
            timestep=t.to(device) / 1000,
            encoder_hidden_states=pad_sequence(embeds, batch_first=True),
            encoder_hidden_states_mask=pad_sequence(
                [torch.ones(len(it), dtype=torch.bool, device=device) for it in embeds], batch_first=True
            ),
            img_shapes=[[(1, height // 2, width // 2)]] * len(noisy),
            return_dict=False,
        )[0]
        return unpacked(velocity, height, width).float()
