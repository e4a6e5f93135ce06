"""What programs that load LoRA files call the modules of a network, and which keys of a file they know.

A LoRA lies in two tensors of a module: `lora_A` [rank, in] and `lora_B` [out, rank]. How programs spell that differs.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.lora.families import Family
from trainer.lora.families import Name as FamilyName

Program = Literal["diffusers", "ggk", "comfyui"]

# Ends of keys, with what they hold.
_ENDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_down.weight": "A",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}
_PEFT_ENDS = {"A": ".lora_A.weight", "B": ".lora_B.weight", "alpha": ".alpha"}
_KOHYA_ENDS = {"A": ".lora_down.weight", "B": ".lora_up.weight", "alpha": ".alpha"}

# Modules that a LoRA can be on: as diffusers names them, and as the model's authors did.
_DIFFUSERS = {
    "sdxl": r"(down_blocks\.\d+|up_blocks\.\d+|mid_block)\.attentions\.\d+\.(proj_in|proj_out|transformer_blocks\.\d+\."
    r"(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)))",
    "flux": r"(transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|(ff|ff_context)\.net\.(0\.proj|2)|(norm1|norm1_context)\.linear)"
    r"|single_transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out|norm\.linear))",
    "qwen_image": r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|(img|txt)_mlp\.net\.(0\.proj|2)|(img|txt)_mod\.1)",
    "z_image": r"(layers|noise_refiner|context_refiner)\.\d+\."
    r"(attention\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.w[123]|adaLN_modulation\.0)",
}
_ORIGINAL = {
    "sdxl": r"((input|output)_blocks\.\d+\.\d+|middle_block\.\d+)\.(proj_in|proj_out|transformer_blocks\.\d+\."
    r"(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)))",
    "flux": r"(double_blocks\.\d+\.(img|txt)_(attn\.(qkv|proj)|mlp\.[02]|mod\.lin)"
    r"|single_blocks\.\d+\.(linear1|linear2|modulation\.lin))",
    "qwen_image": _DIFFUSERS["qwen_image"],
    "z_image": r"(layers|noise_refiner|context_refiner)\.\d+\."
    r"(attention\.(qkv|out)|feed_forward\.w[123]|adaLN_modulation\.0)",
}
# Parts of names that have an underscore of their own.
_WORD = re.compile(
    "(single_|double_|single_transformer_|transformer_|down_|up_|input_|output_)blocks|(mid|middle)_block"
    "|(noise|context)_refiner|feed_forward|adaLN_modulation|to_add_out|add_[qkv]_proj|to_(out|[qkv])|proj_(in|out|mlp)"
    "|(ff|norm1)_context|(img|txt)_(attn|mlp|mod)|[^_]+"
)

# Modules that programs hold as one, in the order of its rows: a LoRA of a later one needs those of all before it.
_FUSED: dict[FamilyName, tuple[tuple[str, ...], ...]] = {
    "sdxl": (),
    "flux": (("to_q", "to_k", "to_v", "proj_mlp"), ("add_q_proj", "add_k_proj", "add_v_proj")),
    "qwen_image": (),
    "z_image": (("to_q", "to_k", "to_v"),),
}
_ALWAYS = 3  # of those, the ones that belong together: queries, keys and values


class _Spelling(NamedTuple):
    """A prefix, and whose names follow it: `kohya` ones have underscores where others have dots."""

    prefix: str
    whose: tuple[Literal["diffusers", "original"], ...]
    kohya: bool = False
    only: str = ""  # expression that the name has to match as well


_BOTH: tuple[Literal["diffusers", "original"], ...] = ("diffusers", "original")
# diffusers: measured with 0.42. ggk: by its converter of names, 0.9.7. ComfyUI: by the map in its source.
_SPELLINGS: dict[Program, dict[FamilyName, tuple[_Spelling, ...]]] = {
    "diffusers": {
        "sdxl": (_Spelling("unet.", ("diffusers",)), _Spelling("lora_unet_", _BOTH, kohya=True)),
        "flux": (
            _Spelling("transformer.", ("diffusers",)),
            _Spelling("lora_transformer_", ("diffusers",), kohya=True),
            _Spelling("lora_unet_", ("original",), kohya=True),
        ),
        "qwen_image": (_Spelling("transformer.", ("diffusers",)), _Spelling("diffusion_model.", ("diffusers",))),
        "z_image": (_Spelling("transformer.", ("diffusers",)), _Spelling("diffusion_model.", _BOTH)),
    },
    "ggk": {
        "sdxl": (
            _Spelling("unet.", ("diffusers",)),
            _Spelling("lora_unet_", _BOTH, kohya=True),
            _Spelling("lycoris_unet_", ("diffusers",), kohya=True),
        ),
        "flux": (
            _Spelling("transformer.", ("diffusers",)),
            _Spelling("diffusion_model.", ("original",)),
            _Spelling("lora_unet_", ("original",), kohya=True),
            _Spelling("", ("diffusers",)),
        ),
        "qwen_image": (
            _Spelling("transformer.", ("diffusers",)),
            _Spelling("diffusion_model.", ("diffusers",)),
            _Spelling("lora_unet_", ("diffusers",), kohya=True),
            _Spelling("", ("diffusers",)),
        ),
        "z_image": (
            _Spelling("transformer.", _BOTH),
            _Spelling("diffusion_model.", _BOTH),
            _Spelling("lora_unet_", _BOTH, kohya=True, only=r"attention\."),
        ),
    },
    "comfyui": {
        "sdxl": (_Spelling("lora_unet_", _BOTH, kohya=True),),
        "flux": (
            _Spelling("transformer.", ("diffusers",)),
            _Spelling("diffusion_model.", ("original",)),
            _Spelling("lora_unet_", ("original",), kohya=True),
            _Spelling("lora_transformer_", ("diffusers",), kohya=True),
        ),
        "qwen_image": (
            _Spelling("transformer.", ("diffusers",)),
            _Spelling("diffusion_model.", ("diffusers",)),
            _Spelling("lora_unet_", ("diffusers",), kohya=True),
        ),
        "z_image": (_Spelling("diffusion_model.", _BOTH), _Spelling("lora_unet_", ("original",), kohya=True)),
    },
}


class Key(NamedTuple):
    """A key that was understood: the module, and which of its tensors."""

    module: str
    holds: Literal["A", "B", "alpha"]


def parse(key: str, family: Family, program: Program) -> Key | None:
    """What a program that runs the family takes a key for; None: it does not know it."""
    end = next((end for end in _ENDS if key.endswith(end)), None)
    if end is None:
        return None
    name = key.removesuffix(end)
    for spelling in _SPELLINGS[program][family.name]:
        if not name.startswith(spelling.prefix):
            continue
        module = name.removeprefix(spelling.prefix)
        if spelling.kohya:
            if "." in module:
                continue
            module = ".".join(word.group() for word in _WORD.finditer(module))
        grammars = {"diffusers": _DIFFUSERS, "original": _ORIGINAL}
        if any(re.fullmatch(grammars[whose][family.name], module) for whose in spelling.whose) and re.search(
            spelling.only, module
        ):
            return Key(module, _ENDS[end])
    return None


def key(module: str, holds: Literal["A", "B", "alpha"], family: Family) -> str:
    """The key of a module's tensor in a file for diffusers."""
    return f"{family.part}.{module}{_PEFT_ENDS[holds]}"


def variant_key(module: str, holds: Literal["A", "B", "alpha"], family: Family) -> str:
    """The key in the file for other programs: one that ggk and ComfyUI both know."""
    if family.name == "sdxl":
        return f"lora_unet_{module.replace('.', '_')}{_KOHYA_ENDS[holds]}"
    # Only FLUX.1's own names, which are other ones, may follow `diffusion_model.` there.
    prefix = "transformer" if family.name == "flux" else "diffusion_model"
    return f"{prefix}.{module}{_PEFT_ENDS[holds]}"


def missing(modules: Collection[str], family: Family) -> dict[str, str]:
    """Modules without which programs that hold several as one would lose, or misplace, those that are there.

    Returns:
        Names of missing modules, each with one that is there of the same.
    """
    found = {}
    for module in modules:
        for group in _FUSED[family.name]:
            for end in group:
                if (base := _base(module, end)) is None:
                    continue
                # proj_mlp lies beside the attention, its keys within.
                wanted = (f"{base}attn.{part}" if end == "proj_mlp" else base + part for part in group[:_ALWAYS])
                found |= {name: module for name in wanted if name not in modules}
    return found


def _base(module: str, end: str) -> str | None:
    return module.removesuffix(end) if module.endswith(f".{end}") else None


@dataclass(frozen=True)
class Known:
    """Which keys of a file a program knows: `known` of `total`; the names of the others; modules it would need."""

    known: int
    total: int
    unknown: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether everything in the file would be applied as it was trained."""
        return not self.unknown and not self.missing

    def __str__(self) -> str:
        return f"{self.known} of {self.total}"


def check(keys: Iterable[str], family: Family, program: Program) -> Known:
    """Which keys of a LoRA file a program that runs the family would know."""
    keys = sorted(keys)
    parsed = {key: parse(key, family, program) for key in keys}
    modules = {found.module for found in parsed.values() if found}
    unknown = tuple(key for key in keys if parsed[key] is None)
    # diffusers keeps the modules apart.
    needed = () if program == "diffusers" else tuple(sorted(missing(modules, family)))
    return Known(len(keys) - len(unknown), len(keys), unknown, needed)
