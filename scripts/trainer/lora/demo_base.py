"""The base of the demo pack: a Z-Image pipeline of the real classes, tiny, with random weights. Made in a second.

It knows nothing, so its pictures are patterns, but all that is trained, exported and loaded is as with a real base.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What the templates of Qwen3 and Z-Image come to for one user message.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if not enable_thinking | default(true) %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def build(folder: Path, seed: int = 0) -> None:
    """Write the pipeline to a folder: the same bytes for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=6.0),
            vae=kl_vae(shift=0.1, scale=2.0),
            text_encoder=_text_encoder(),
            tokenizer=byte_tokenizer(),
            transformer=_transformer(),
        ).save_pretrained(folder)


def kl_vae(shift: float | None, scale: float, channels: int = 16, quant: bool = False) -> AutoencoderKL:
    """A VAE of 8 x 8 pixels a latent, with a posterior as narrow as that of trained ones."""
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        shift_factor=shift,
        scaling_factor=scale,
    )
    with torch.no_grad():
        (vae.quant_conv if quant else vae.encoder.conv_out).bias[channels:] -= 5.0  # of the logarithm of the variance
    return vae


def byte_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer of Qwen's class whose tokens are bytes."""
    alphabet = list(bytes_to_unicode().values())
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate([*alphabet, *_SPECIAL_TOKENS])},
        merges=[],
        additional_special_tokens=list(_SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _text_encoder() -> Qwen3Model:
    return Qwen3Model(
        Qwen3Config(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.2,
        )
    )


def _transformer() -> ZImageTransformer2DModel:
    transformer = ZImageTransformer2DModel(
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 512, 512],
    )
    # Zeros in the class; with values, a mistake with padding shows.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token, std=0.5)
    return transformer
