"""MageFlow: Qwen3-VL-4B, which reads text and reference pictures for it, replaced by pig_clip."""

from trainer.packs import qwen3_vl
from trainer.packs.base import PIG_CLIP, AdapterPack, Work

PACK = AdapterPack(
    name="mageflow",
    title="MageFlow-Edit (Qwen3-VL-4B)",
    contract="qwen3vl_mageflow/1",
    file_name="pig_qwen3vl_4b_adapter",
    teacher="qwen3_vl_mageflow",
    student="qwen3",
    student_dim=1024,
    teacher_dim=2560,
    vision_dim=2560,
    max_student_tokens=1024,
    # 36 layers of 101 M, the embeddings in bf16. At the pack's counts 65 % of the samples have a picture, of 100 rows
    # each; a row is four of the tower's patches, in 24 blocks of 12.6 M.
    work=Work(
        teacher_parameters=3.63e9,
        teacher_part=0.78,
        teacher_tokens=160,
        student_parameters=0.44e9,
        student_tokens=160,
        rows=160,
        vision_rows=72,
        tower_parameters=1.2e9,
    ),
    metric="cos_slice",
    materials=(qwen3_vl.teacher("4B"), *PIG_CLIP),
    gguf={
        "adapter.target": "MageFlow",
        "adapter.qwen_hidden_source": "final_norm",
        "adapter.teacher_tap": "final_norm",
    },
    command=(
        "ggk diffuser engine -- --diffusion-model mageflow-edit-q4_0.gguf --vae pig_mageflow_vae-f16.gguf "
        "--llm pig_clip-q8_0.gguf --llm-adapter {gguf} "
        '-p "close-up portrait of a young lady" --cfg-scale 1 --diffusion-fa -s 42 -o out.png'
    ),
    reference_options="--llm_vision mmproj-qwen3vl-4b-it-f16.gguf -r reference.png",
)
