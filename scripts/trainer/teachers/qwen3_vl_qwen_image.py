"""Qwen3-VL as Qwen-Image 2.1 reads it."""

from pathlib import Path

import torch

from trainer import chat_templates, reference_images
from trainer.teachers import qwen3_vl
from trainer.teachers.qwen3_vl import EMBEDDINGS as EMBEDDINGS

CONTRACT = qwen3_vl.Contract(
    template=chat_templates.QWEN_IMAGE,
    size=reference_images.qwen_image_size,
    pixels=reference_images.qwen_image_pixels,
    whole=True,
    areas=True,
)


def load(path: Path, dtype: torch.dtype) -> qwen3_vl.Qwen3Vl:
    """See `qwen3_vl.load`."""
    return qwen3_vl.load(path, dtype, CONTRACT)
