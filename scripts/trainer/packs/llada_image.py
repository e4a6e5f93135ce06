"""LLaDA-Image-Turbo: its 16B text encoder replaced by pig_clip and 256 queries that are not seeded."""

from trainer.packs.base import PIG_CLIP, AdapterPack, Material, Template, Work

_REPOSITORY = "inclusionAI/LLaDA-Image-Turbo"
_REVISION = "f4afc52d925bbac4e22a1c947111fc1f127e37e5"
_ANSWER = "\n<role>ASSISTANT</role>\n<IMAGE1>"

PACK = AdapterPack(
    name="llada_image",
    title="LLaDA-Image-Turbo (LLaDA2-MoE 16B text encoder)",
    contract="llada_image/2",
    file_name="pig_llada_adapter",
    teacher="llada",
    student="qwen3",
    student_dim=1024,
    teacher_dim=2560,
    queries=256,
    max_student_tokens=512,
    # 19 layers with 39 M of 0.8 G in use, one of 42 M, six of the projection with 53 M; a layer of experts in bf16.
    # A prompt is 55 tokens and the 256 queries.
    work=Work(
        teacher_parameters=1.1e9,
        teacher_part=1.64,
        teacher_tokens=311,
        student_parameters=0.44e9,
        student_tokens=55,
        rows=256,
    ),
    # All rows share an offset of about 2000 a dimension.
    metric="cos_centered",
    template=Template(
        # The space before the prompt belongs to its piece: alone, it would be a token of its own.
        pieces=("<role>HUMAN</role> Generate an image:", " {prompt}", _ANSWER),
        empty=(f"<role>HUMAN</role> Generate an image.{_ANSWER}",),
    ),
    materials=(
        Material(
            id="teacher",
            kind="hub",
            title="LLaDA-Image-Turbo text encoder (teacher)",
            role="teacher",
            repository=_REPOSITORY,
            revision=_REVISION,
            # No *.py: the code in text_encoder/ is neither needed nor run.
            patterns=(
                "model_index.json",
                "text_encoder/config.json",
                "text_encoder/*.safetensors",
                "text_encoder/*.safetensors.index.json|text_encoder/model.safetensors",
                "queryformer/config.json",
                "queryformer/*.safetensors",
                "text_projection/config.json",
                "text_projection/*.safetensors",
                "tokenizer/tokenizer.json",
            ),
            optional=(
                "queryformer/*.safetensors.index.json",
                "text_projection/*.safetensors.index.json",
                "tokenizer/*.json",
                "tokenizer/*.jinja",
            ),
            expects={
                "text_encoder/config.json": {"model_type": "llada2_moe"},
                "text_projection/config.json": {"projection_dim": "adapter.teacher_dim"},
            },
            gigabytes=33,
        ),
        *PIG_CLIP,
        Material(
            id="sigvq",
            kind="hub",
            title="SigVQ (the encoder of reference images)",
            role="companion",
            repository=_REPOSITORY,
            revision=_REVISION,
            patterns=("sigvq/*.safetensors",),
            optional=("sigvq/config.json", "sigvq/*.safetensors.index.json"),
            gigabytes=2.4,
        ),
    ),
    gguf={"adapter.target": "LLaDA-Image-Turbo", "adapter.qwen_hidden_source": "final_norm"},
    command=(
        "ggk diffuser engine -- --diffusion-model llada-image-turbo-q4_0.gguf --vae pig_flux2_vae_fp32-f16.gguf "
        "--llm pig_clip-q8_0.gguf --llm-adapter {gguf} "
        '-p "close-up portrait of a young lady" --cfg-scale 1 --steps 4 --diffusion-fa -s 42 -o out.png'
    ),
    reference_options="--llm_vision {companion} -r reference.png",
)
