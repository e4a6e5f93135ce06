"""Tiny random pipelines of the real classes, one a family, saved as the real ones lie on disk."""

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from trainer.lora import demo_base
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

# The schedulers' configs of the published models.
SDXL_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
FLUX_SCHEDULER = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def save(family, folder, seed=0, **scheduler):
    """Build the pipeline of a family in a folder; more arguments are of the scheduler's config. Returns the folder."""
    if family == "z_image":
        demo_base.build(folder, seed)
        if scheduler:
            FlowMatchEulerDiscreteScheduler(**scheduler).save_pretrained(folder / "scheduler")
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        {"sdxl": _sdxl, "flux": _flux, "qwen_image": _qwen_image}[family](scheduler).save_pretrained(folder)
    return folder


def clip_tokenizer(pad="<|endoftext|>"):
    alphabet = list(bytes_to_unicode().values())
    tokens = [*alphabet, *(f"{it}</w>" for it in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[], pad_token=pad, model_max_length=77
    )


def _clip(kind, hidden, pad):
    return kind(
        CLIPTextConfig(
            vocab_size=514,
            hidden_size=hidden,
            intermediate_size=64,
            projection_dim=hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=512,
            eos_token_id=513,
            pad_token_id=pad,
            initializer_factor=2.0,
        )
    )


def _sdxl(scheduler):
    return StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(**{**SDXL_SCHEDULER, **scheduler}),
        vae=demo_base.kl_vae(shift=None, scale=4.0, channels=4, quant=True),
        text_encoder=_clip(CLIPTextModel, 32, 513),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_clip(CLIPTextModelWithProjection, 32, 0),
        tokenizer_2=clip_tokenizer("!"),
        unet=UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(32, 64),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            transformer_layers_per_block=(1, 1),
            use_linear_projection=True,
            cross_attention_dim=64,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32,
        ),
        add_watermarker=False,
    )


def _flux(scheduler):
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(chr(it) for it in range(33, 127))]
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**{**FLUX_SCHEDULER, **scheduler}),
        vae=demo_base.kl_vae(shift=0.1159, scale=2.0),
        text_encoder=_clip(CLIPTextModel, 32, 513),
        tokenizer=clip_tokenizer(),
        text_encoder_2=T5EncoderModel(
            T5Config(
                vocab_size=128,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        ),
        tokenizer_2=T5Tokenizer(vocab=[(piece, -float(n)) for n, piece in enumerate(pieces)], extra_ids=0),
        transformer=FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _qwen_vae():
    """With pictures of about the contrast of the other tiny VAEs: as it is made, they are all but grey."""
    vae = AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    latents = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    last = vae.decoder.conv_out
    with torch.no_grad():
        last.bias -= vae.decode(latents).sample.mean((0, 2, 3, 4))
        last.weight *= 10
        last.bias *= 10
    return vae


def _qwen_image(scheduler):
    text = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": 258,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**{**QWEN_SCHEDULER, **scheduler}),
        vae=_qwen_vae(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=demo_base.byte_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
        ),
    )
