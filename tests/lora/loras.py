"""Tiny pipelines of the real classes that take conditions instead of text, and LoRAs that were trained on them."""

import os
from functools import cache
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import diffusers
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from trainer.lora import families, files

FAMILIES = tuple(families.names())
RANK = 8
ABOUT = files.About(
    name="fox",
    run="fox",
    alpha=16.0,
    base="tiny/base",
    base_sha256="b" * 64,
    dataset_sha256="d" * 64,
    settings_sha256="5" * 64,
    steps=5,
    planned_steps=9,
    checkpoint="best",
    resolution=64,
    pictures=3,
    trigger="a photo of sks fox",
)

_BLOCKS = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}


def _vae(channels: int) -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=channels == 4,
        use_post_quant_conv=channels == 4,
        **_BLOCKS,
    )


def _sdxl() -> Any:
    torch.manual_seed(1)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(4),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        add_watermarker=False,
    )


def _flux() -> Any:
    torch.manual_seed(2)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    schedule = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    nothing = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return diffusers.FluxPipeline(vae=_vae(16), transformer=transformer, scheduler=schedule, **nothing)


def _qwen_image() -> Any:
    torch.manual_seed(3)
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    schedule = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    nothing = dict.fromkeys(("text_encoder", "tokenizer"))
    return diffusers.QwenImagePipeline(vae=vae, transformer=transformer, scheduler=schedule, **nothing)


def _z_image() -> Any:
    torch.manual_seed(4)
    transformer = diffusers.ZImageTransformer2DModel(
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    with torch.no_grad():
        for pad in (transformer.x_pad_token, transformer.cap_pad_token):
            pad.normal_()
    schedule = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    nothing = dict.fromkeys(("text_encoder", "tokenizer"))
    return diffusers.ZImagePipeline(vae=_vae(16), transformer=transformer, scheduler=schedule, **nothing)


@cache
def pipeline(family: str) -> Any:
    """The one tiny pipeline of a family; tests leave it as it was."""
    made = {"sdxl": _sdxl, "flux": _flux, "qwen_image": _qwen_image, "z_image": _z_image}[family]()
    made.set_progress_bar_config(disable=True)
    return made


def network(family: str) -> Any:
    return getattr(pipeline(family), families.get(family).part)


def conditions(family: str, seed: int = 0) -> dict[str, Any]:
    """What a pipeline gets in place of a prompt, with how it is asked for a picture."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    common = {"num_inference_steps": 2, "height": 64, "width": 64}
    if family == "sdxl":
        return common | {"prompt_embeds": random(1, 77, 64), "pooled_prompt_embeds": random(1, 32), "guidance_scale": 1}
    if family == "flux":
        return common | {"prompt_embeds": random(1, 16, 32), "pooled_prompt_embeds": random(1, 32)}
    if family == "qwen_image":
        mask = torch.ones(1, 12, dtype=torch.long)
        return common | {"prompt_embeds": random(1, 12, 32), "prompt_embeds_mask": mask, "true_cfg_scale": 1}
    return common | {"prompt_embeds": [random(20, 32)], "guidance_scale": 0}


def _output(family: str, net: torch.nn.Module) -> torch.Tensor:
    """What the network makes of fixed inputs, for training on."""
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    given = conditions(family)
    if family == "sdxl":
        more = {"text_embeds": given["pooled_prompt_embeds"], "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])}
        return net(random(1, 4, 8, 8), torch.tensor([300.0]), given["prompt_embeds"], added_cond_kwargs=more).sample
    if family == "z_image":
        return torch.stack(net([random(16, 1, 8, 8)], torch.tensor([0.5]), given["prompt_embeds"]).sample)
    inputs = {"hidden_states": random(1, 16, 64), "encoder_hidden_states": given["prompt_embeds"]}
    if family == "qwen_image":
        mask = given["prompt_embeds_mask"]
        return net(**inputs, encoder_hidden_states_mask=mask, timestep=torch.tensor([0.5]), img_shapes=[[(1, 4, 4)]])[0]
    more = {"pooled_projections": given["pooled_prompt_embeds"], "guidance": torch.ones(1)}
    ids = {"img_ids": torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], 1)}
    return net(**inputs, **more, **ids, txt_ids=torch.zeros(16, 3), timestep=torch.tensor([0.5]))[0]


@cache
def trained(family: str, alpha: float = 16.0, steps: int = 5) -> dict[str, torch.Tensor]:
    """LoRA weights after some steps: `<module>.lora_A.weight` [8, in] and `<module>.lora_B.weight` [out, 8], f32."""
    net = network(family).requires_grad_(False)
    attach(family, alpha)
    weights = [weight for name, weight in net.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(weights, lr=2e-2)
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(_output(family, net).shape, generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        (_output(family, net) - target).square().mean().backward()
        optimizer.step()
    found = {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(net, adapter_name="x").items()}
    detach(family)
    return found


def attach(family: str, alpha: float) -> None:
    torch.manual_seed(0)
    targets = list(families.get(family).targets)
    config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules=targets, init_lora_weights="gaussian")
    network(family).add_adapter(config, adapter_name="x")


def detach(family: str) -> None:
    net = network(family)
    recurse_remove_peft_layers(net)
    del net.peft_config
    net._hf_peft_config_loaded = False


def lora(family: str, alpha: float = 16.0, dtype: torch.dtype = torch.float32) -> files.Lora:
    return files.folded(trained(family, alpha), families.get(family), alpha, dtype)
