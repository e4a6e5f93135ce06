"""MageFlow-Edit: Qwen3-VL-4B replaced by pig_clip."""

from trainer.packs.base import PIG_CLIP, Material, Pack, Work

PACK = Pack(
    name="mageflow",
    title="MageFlow-Edit (Qwen3-VL-4B)",
    contract="qwen3vl_mageflow/1",
    file_name="pig_qwen3vl_4b_adapter",
    teacher="qwen3_vl_mageflow",
    student="qwen3",
    student_dim=1024,
    teacher_dim=2560,
    queries=None,
    vocabulary=None,
    vision_dim=2560,
    max_student_tokens=1024,
    work=Work(
        teacher_parameters=3.6e9,
        teacher_part=0.78,
        teacher_tokens=60,
        student_parameters=0.44e9,
        student_tokens=60,
    ),
    metric="cos_slice",
    materials=(
        Material(
            id="teacher",
            kind="hub",
            title="Qwen3-VL-4B-Instruct (teacher)",
            role="teacher",
            repository="Qwen/Qwen3-VL-4B-Instruct",
            patterns=("config.json", "*.safetensors"),
            optional=("model.safetensors.index.json",),
            expects={"config.json": {"model_type": "qwen3_vl"}},
            gigabytes=8.3,
        ),
        *PIG_CLIP,
    ),
    gguf={"adapter.qwen_hidden_source": "final_norm"},
)
