"""PixArt: the T5-XXL v1.1 encoder replaced by pig_clip and 120 queries seeded with the T5 ids of their slots."""

from trainer.packs.base import PIG_CLIP, AdapterPack, Material, Work

PACK = AdapterPack(
    name="pixart",
    title="PixArt (T5-XXL v1.1 encoder)",
    contract="t5xxl_pixart/1",
    file_name="pig_t5_adapter",
    teacher="t5",
    student="qwen3",
    student_dim=1024,
    teacher_dim=4096,
    queries=120,
    vocabulary=32128,
    max_student_tokens=256,
    # 24 layers of 193 M; a layer in bf16.
    work=Work(
        teacher_parameters=4.63e9,
        teacher_part=0.39,
        teacher_tokens=40,
        student_parameters=0.44e9,
        student_tokens=30,
        rows=40,
    ),
    materials=(
        Material(
            id="teacher",
            kind="hub",
            title="T5-XXL v1.1 encoder (teacher)",
            role="teacher",
            repository="callgg/t5-v1_1-xxl-encoder-bf16",
            patterns=("config.json", "*.safetensors", "spiece.model|tokenizer.json"),
            optional=(
                "model.safetensors.index.json",
                "special_tokens_map.json",
                "tokenizer_config.json",
            ),
            expects={
                "config.json": {
                    "model_type": "t5",
                    "d_model": "adapter.teacher_dim",
                    "vocab_size": "adapter.vocabulary",
                }
            },
            gigabytes=9.5,
        ),
        *PIG_CLIP,
    ),
    gguf={"adapter.target": "PixArt", "adapter.qwen_hidden_source": "final_norm"},
    command=(
        "ggk diffuser engine -- --diffusion-model pixart-nvfp4.gguf --vae pig_pixart_vae_fp16-f16.gguf "
        "--llm pig_clip-q8_0.gguf --llm-adapter {gguf} "
        '-p "close-up portrait of a young lady" --diffusion-fa -s 42 -o out.png'
    ),
)
