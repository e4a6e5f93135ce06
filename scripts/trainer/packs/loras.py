"""The LoRA packs: one for each family, and a demo on a tiny model that is made here."""

from trainer.lora import families
from trainer.lora.families import Family
from trainer.packs.base import LoraPack, Material

# By family: GB of the files below.
_GIGABYTES = {"sdxl": 13.9, "flux": 33.8, "qwen_image": 57.7, "z_image": 20.6}


def _weights(folder: str, name: str) -> str:
    """One file, or numbered parts of one; no variants in f16, whose names go on before the suffix."""
    return f"{folder}/{name}.safetensors|{folder}/{name}-?????-of-?????.safetensors"


def _base(family: Family) -> Material:
    """A pipeline's folder as diffusers keeps it, by the files that training needs."""
    networks = ("vae", family.part)
    tokenizers = [folder.replace("text_encoder", "tokenizer") for folder in family.text_encoders]
    index = "{}/{}.safetensors.index.json"
    return Material(
        id="base",
        kind="hub",
        title=f"{family.title} (base)",
        role="base",
        repository=family.repository,
        patterns=(
            *("model_index.json", "scheduler/scheduler_config.json"),
            *(f"{folder}/config.json" for folder in (*networks, *family.text_encoders)),
            *(_weights(folder, "diffusion_pytorch_model") for folder in networks),
            *(_weights(folder, "model") for folder in family.text_encoders),
            *(f"{folder}/tokenizer_config.json" for folder in tokenizers),
            *(
                "|".join(f"{it}/{file}" for file in ("tokenizer.json", "vocab.json", "spiece.model"))
                for it in tokenizers
            ),
        ),
        optional=(
            *(index.format(folder, "diffusion_pytorch_model") for folder in networks),
            *(index.format(folder, "model") for folder in family.text_encoders),
            *(f"{folder}/*.{suffix}" for folder in tokenizers for suffix in ("json", "txt", "model", "jinja")),
        ),
        gigabytes=_GIGABYTES[family.name],
    )


def _pack(name: families.Name) -> LoraPack:
    family = families.get(name)
    return LoraPack(
        name=f"{name}_lora",
        title=f"{family.title} LoRA",
        file_name=f"my_{name}_lora",
        materials=(_base(family),),
        family=name,
    )


_DEMO = families.get("z_image")

DEMO = LoraPack(
    name="lora_demo",
    title="LoRA demo (a tiny random model, drawn pictures)",
    file_name="lora_demo",
    materials=(
        Material(
            id="base",
            kind="made",
            title=f"tiny random {_DEMO.title}",
            role="base",
            module="trainer.lora.demo_base:build",
            patterns=_base(_DEMO).patterns,
            optional=_base(_DEMO).optional,
            gigabytes=0.01,
        ),
        Material(
            id="pictures",
            kind="made",
            title="drawn pictures",
            role="pictures",
            module="trainer.lora.demo_pictures:make",
            gigabytes=0.001,
        ),
    ),
    family=_DEMO.name,
    pictures=12,
)

PACKS = (*map(_pack, families.names()), DEMO)
