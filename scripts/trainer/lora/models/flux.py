"""FLUX.1: a transformer that predicts velocity. Conditions: embeds [512, 4096] of T5, pooled [768] of CLIP."""

from collections.abc import Sequence
from functools import cached_property

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from trainer.lora import families
from trainer.lora.models import base
from trainer.lora.models.base import Conditions, dtype_of, packed, stacked, unpacked


class TextEncoder(base.TextEncoder):
    """CLIP and T5. The network sees all rows of T5, those of padding too, so they are kept."""

    def _encode(self, caption: str) -> Conditions:
        embeds, pooled, _ = self.pipeline.encode_prompt([caption], device=self.device)
        return {"embeds": embeds, "pooled": pooled}

    def _length(self, caption: str) -> tuple[int, int]:
        # What CLIP cuts off at 77 is in T5's rows.
        return len(self.pipeline.tokenizer_2(caption, verbose=False).input_ids), Model.family.text_tokens


class Model(base.FlowModel):
    """A FLUX.1 pipeline."""

    family = families.get("flux")

    @cached_property
    def _distilled(self) -> bool:
        """Whether guidance is an input of the network."""
        return self.config("transformer").get("guidance_embeds", False)

    def text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """CLIP, T5 and their tokenizers."""
        pipeline = FluxPipeline(
            vae=None,
            transformer=None,
            scheduler=None,
            text_encoder=self.load(CLIPTextModel, "text_encoder", dtype=dtype).to(device),
            text_encoder_2=self.load(T5EncoderModel, "text_encoder_2", dtype=dtype).to(device),
            tokenizer=self.tokenizer(CLIPTokenizer, "tokenizer"),
            tokenizer_2=self.tokenizer(T5Tokenizer, "tokenizer_2"),
        )
        return TextEncoder(pipeline, device)

    def vae(self, device: torch.device) -> base.Vae:
        """The VAE."""
        vae = self.load(AutoencoderKL, "vae", torch_dtype=torch.float32)
        return base.Vae(vae, torch.tensor(vae.config.shift_factor), torch.tensor(vae.config.scaling_factor), device)

    def predict(
        self,
        network: nn.Module,
        noisy: Tensor,
        t: Tensor,
        conditions: Sequence[Conditions],
        time_ids: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Velocity. Position ids, sigma and guidance are f32."""
        size, device = noisy.shape[2:], noisy.device
        embeds = stacked(conditions, "embeds", network, device)
        rows, columns = torch.meshgrid(*(torch.arange(it // 2, device=device) for it in size), indexing="ij")
        image_ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float()
        velocity = network(
            hidden_states=packed(noisy.to(dtype_of(network))),
            timestep=t.to(device) / 1000,
            guidance=torch.full((len(noisy),), guidance, device=device) if self._distilled else None,
            pooled_projections=stacked(conditions, "pooled", network, device),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device),
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return unpacked(velocity, *size).float()
