"""Qwen-Image 2.1: Qwen3-VL-8B, which reads text and reference pictures for it, replaced by pig_clip."""

from trainer.packs import qwen3_vl
from trainer.packs.base import PIG_CLIP, AdapterPack, Work

PACK = AdapterPack(
    name="qwen_image",
    title="Qwen-Image 2.1 (Qwen3-VL-8B)",
    contract="qwen3vl_qwenimage/1",
    file_name="pig_qwen3vl_8b_adapter",
    teacher="qwen3_vl_qwen_image",
    student="qwen3",
    student_dim=1024,
    teacher_dim=4096,
    vision_dim=4096,
    max_student_tokens=2304,
    # 36 layers of 193 M, the embeddings in bf16. At the pack's counts 44 % of the samples have pictures, of 358 rows
    # each at the default areas; a row is four of the tower's patches, in 27 blocks of 15.2 M, and three mergers.
    work=Work(
        teacher_parameters=6.95e9,
        teacher_part=1.25,
        teacher_tokens=211,
        student_parameters=0.44e9,
        student_tokens=211,
        rows=37,
        vision_rows=160,
        tower_parameters=1.8e9,
    ),
    metric="cos_slice",
    materials=(qwen3_vl.teacher("8B"), *PIG_CLIP),
    gguf={
        "adapter.target": "Qwen-Image 2.1",
        "adapter.qwen_hidden_source": "final_norm",
        "adapter.teacher_tap": "pre_norm_last_layer",
        "adapter.teacher_deepstack": True,
        "adapter.vision_contract": "qwen_image_2_1",
        "adapter.supervised_rows": "consumed_text",
    },
    command=(
        "ggk diffuser engine -- --diffusion-model qwen-image-2.1-q4_0.gguf --vae pig_qwen_image_2.1_vae-f16.gguf "
        "--llm pig_clip-q8_0.gguf --llm-adapter {gguf} "
        '-p "close-up portrait of a young lady" --cfg-scale 1 --diffusion-fa -s 42 -o out.png'
    ),
    reference_options="--llm_vision mmproj-qwen3vl-8b-it-f16.gguf -r reference.png",
)
