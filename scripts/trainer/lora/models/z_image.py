"""Z-Image: a transformer that predicts velocity. Conditions: embeds [L, 2560] of Qwen3, L up to 512."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, ZImagePipeline
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Model

from trainer.lora import families
from trainer.lora.models import base
from trainer.lora.models.base import Conditions, dtype_of


class TextEncoder(base.TextEncoder):
    """Qwen3, the layer before the last, of the caption in the chat template."""

    def _encode(self, caption: str) -> Conditions:
        (embeds,), _ = self.pipeline.encode_prompt(
            [caption],
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=Model.family.text_tokens,
        )
        return {"embeds": embeds[None]}

    def _length(self, caption: str) -> tuple[int, int]:
        tokenizer, message = self.pipeline.tokenizer, {"role": "user", "content": caption}
        text = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(tokenizer(text, verbose=False).input_ids), Model.family.text_tokens


class Model(base.FlowModel):
    """A Z-Image pipeline."""

    family = families.get("z_image")

    def text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Qwen3 and its tokenizer."""
        pipeline = ZImagePipeline(
            vae=None,
            transformer=None,
            scheduler=None,
            text_encoder=self.load(Qwen3Model, "text_encoder", dtype=dtype).to(device),
            tokenizer=self.tokenizer(Qwen2Tokenizer, "tokenizer"),
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
        """Velocity: the network's own has the other sign, and its time runs the other way. It pads by itself."""
        dtype, device = dtype_of(network), noisy.device
        velocities = network(
            list(noisy.to(dtype).unsqueeze(2).unbind()),  # [C, 1, h, w] each
            (1000 - t.to(device)) / 1000,
            [it["embeds"].to(device, dtype) for it in conditions],
            return_dict=False,
        )[0]
        return -torch.stack(velocities).squeeze(2).float()
