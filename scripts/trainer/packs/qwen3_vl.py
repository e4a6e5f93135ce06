"""Qwen3-VL as a material, in the two sizes that models of the engine read."""

from trainer.packs.base import Material

# Size, commit, GB.
_SIZES = {
    "4B": ("ebb281ec70b05090aa6165b016eac8ec08e71b17", 8.3),
    "8B": ("0c351dd01ed87e9c1b53cbc748cba10e6187ff3b", 17.5),
}


def teacher(size: str) -> Material:
    """The teacher of that size."""
    revision, gigabytes = _SIZES[size]
    return Material(
        id="teacher",
        kind="hub",
        title=f"Qwen3-VL-{size}-Instruct (teacher)",
        role="teacher",
        repository=f"Qwen/Qwen3-VL-{size}-Instruct",
        revision=revision,
        patterns=("config.json", "model*.safetensors", "model.safetensors.index.json|model.safetensors"),
        expects={
            "config.json": {
                "model_type": "qwen3_vl",
                # 2560 and 4096: what else is in the folders of both sizes has the same names.
                "text_config.hidden_size": "adapter.teacher_dim",
                "vision_config.out_hidden_size": "adapter.vision_dim",
            }
        },
        gigabytes=gigabytes,
    )
