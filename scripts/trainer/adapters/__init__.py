"""The networks that are trained, with the tensor names and shapes of the engine."""

from collections.abc import Container

import torch
from torch import Tensor

from trainer.adapters.resampler import Resampler
from trainer.adapters.token_aligned import TokenAligned
from trainer.config import Adapter as Shape

Adapter = Resampler | TokenAligned


def fresh(shape: Shape) -> Adapter:
    """An adapter of these sizes before training: a resampler if it has queries, else token aligned."""
    sizes = (shape.student_dim, shape.teacher_dim, shape.width, shape.depth)
    if shape.queries:
        return Resampler(*sizes, shape.queries, shape.vocabulary)
    return TokenAligned(*sizes, shape.vision_dim)


def kind(names: Container[str]) -> str:
    """The kind of adapter that tensors of these names are, decided as the engine does."""
    if "query" in names:
        return "seeded_resampler" if "t5_embed.weight" in names else "resampler"
    vision = "vision_proj.weight" in names or "vis_in.weight" in names
    return "token_aligned_vision" if vision else "token_aligned"


def of(tensors: dict[str, Tensor]) -> Adapter:
    """The network that engine tensors describe, from their names and shapes alone, as the engine reads them.

    `tensors` are the file's, without the `adapter.` prefix; weights are widened to f32.

    Raises:
        KeyError, RuntimeError, ValueError: a tensor is missing, unexpected or of another shape.
    """
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    width, student_dim = tensors["in_proj.weight"].shape
    sizes = (student_dim, tensors["out_proj.weight"].shape[0], width, depth)
    what = kind(tensors)
    with torch.device("meta"):
        if "query" in tensors:
            vocabulary = len(tensors["t5_embed.weight"]) if what == "seeded_resampler" else None
            adapter = Resampler(*sizes, len(tensors["query"]), vocabulary)
        else:
            vision_dim = tensors["vision_proj.weight"].shape[1] if what == "token_aligned_vision" else None
            adapter = TokenAligned(*sizes, vision_dim)
    adapter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return adapter.requires_grad_(False).eval()


def in_f32(name: str, tensor: Tensor) -> bool:
    """Whether the file holds a tensor in f32: vectors, queries, and what maps pictures into the student."""
    return tensor.dim() == 1 or name in ("query", "vision_proj.weight")
