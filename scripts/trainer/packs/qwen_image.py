"""Qwen-Image 2.1: Qwen3-VL-8B replaced by pig_clip."""

from trainer.packs.base import PIG_CLIP, Material, Pack, Work

PACK = Pack(
    name="qwen_image",
    title="Qwen-Image 2.1 (Qwen3-VL-8B)",
    contract="qwen3vl_qwenimage/1",
    file_name="pig_qwen3vl_8b_adapter",
    teacher="qwen3_vl_qwen_image",
    student="qwen3",
    student_dim=1024,
    teacher_dim=4096,
    queries=None,
    vocabulary=None,
    vision_dim=4096,
    max_student_tokens=2304,
    work=Work(
        teacher_parameters=6.9e9,
        teacher_part=1.25,
        teacher_tokens=60,
        student_parameters=0.44e9,
        student_tokens=60,
    ),
    metric="cos_slice",
    materials=(
        Material(
            id="teacher",
            kind="hub",
            title="Qwen3-VL-8B-Instruct (teacher)",
            role="teacher",
            repository="Qwen/Qwen3-VL-8B-Instruct",
            patterns=("config.json", "*.safetensors"),
            optional=("model.safetensors.index.json",),
            expects={"config.json": {"model_type": "qwen3_vl"}},
            gigabytes=17.5,
        ),
        *PIG_CLIP,
    ),
    gguf={"adapter.qwen_hidden_source": "final_norm"},
)
