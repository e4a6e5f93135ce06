"""Qwen3-VL as MageFlow reads it."""

from pathlib import Path

import torch

from trainer import chat_templates, reference_images
from trainer.teachers import qwen3_vl
from trainer.teachers.qwen3_vl import EMBEDDINGS as EMBEDDINGS

CONTRACT = qwen3_vl.Contract(
    template=chat_templates.MAGEFLOW,
    size=reference_images.mageflow_size,
    pixels=reference_images.mageflow_pixels,
    whole=False,
    areas=False,
)


def load(path: Path, dtype: torch.dtype) -> qwen3_vl.Qwen3Vl:
    """See `qwen3_vl.load`."""
    return qwen3_vl.load(path, dtype, CONTRACT)
