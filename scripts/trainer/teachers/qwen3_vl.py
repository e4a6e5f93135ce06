"""The vision tower and the text stack of Qwen3-VL, as far as the models of the engine read them.

The tower's parts take a batch of pictures, the text stack's a batch of samples with what the tower made of theirs.
Shapes: B pictures or samples, N patches and n = N / 4 rows of a picture, P tokens, V rows of all pictures of a sample,
D the hidden size of the text stack, which is also that of the tower's output, K decoder layers that take features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextRMSNorm,
    Qwen3VLVisionBlock,
    Qwen3VLVisionPatchEmbed,
    Qwen3VLVisionPatchMerger,
)

from trainer import teachers
from trainer.chat_templates import Prompt, Template
from trainer.errors import TrainerError
from trainer.reference_images import FRAMES, MERGE, PATCH, Pixels, Size
from trainer.streaming import Part, State, check, put
from trainer.weights import Weights

EMBEDDINGS = ("language_model.embed_tokens.weight",)
_TOWER_THETA = 1e4


@dataclass(frozen=True)
class Contract:
    """What a model of the engine makes of Qwen3-VL.

    template: how a sample is worded.
    size: (height, width, reference area) of a picture, in pixels, to the (height, width) that the tower sees.
    pixels: a picture, uint8 RGB [H, W, 3], and that size to what `reference_images.patches` cuts.
    areas: whether that size depends on the area.
    whole: whether Qwen3-VL runs as transformers runs it, features of the tower's inner layers and positions in three
        axes included, up to the last layer, before the final norm. Otherwise the tower's output stands for embeddings
        at plain positions, and rows are those after the final norm.
    """

    template: Template
    size: Callable[[int, int, int], Size]
    pixels: Callable[[NDArray[np.uint8], Size], Pixels]
    whole: bool
    areas: bool


def patch_places(grid: Tensor, patches: int) -> Tensor:
    """[B, N, 2] int64: row and column of each patch, in the order of `reference_images.patches`.

    Args:
        grid: [B, 2] int64, rows and columns of patches.
        patches: N, the same for all.
    """
    number = torch.arange(patches, device=grid.device)
    block, across = number // MERGE**2, grid[:, 1:] // MERGE
    rows = block // across * MERGE + number // MERGE % MERGE
    columns = block % across * MERGE + number % MERGE
    return torch.stack([rows, columns], dim=-1)


def interpolated(table: nn.Embedding, places: Tensor, grid: Tensor) -> Tensor:
    """Position embeddings [B, N, H], f32: bilinear in a square table whose corners are the picture's.

    Args:
        table: [S * S, H].
        places: [B, N, 2] as of `patch_places`.
        grid: [B, 2], 2 or more in each direction.
    """
    side = int(table.num_embeddings**0.5)
    at = places.float() * (side - 1) / (grid[:, None] - 1)
    low = at.floor()
    part = at - low
    low = low.long()
    high = (low + 1).clamp(max=side - 1)
    total = 0
    for row, row_share in ((low, 1 - part), (high, part)):
        for column, column_share in ((low, 1 - part), (high, part)):
            share = row_share[..., 0] * column_share[..., 1]
            total = total + table(row[..., 0] * side + column[..., 1]) * share[..., None]
    return total


def tower_rope(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, N, head_dim], f32: the first half of the angles is a patch's row, the second its column."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=places.device)
    angles = (places[..., None] / _TOWER_THETA ** (quarter / (head_dim // 2))).flatten(-2)
    return _doubled(angles)


def text_rope(positions: Tensor, config: Qwen3VLTextConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, P, head_dim], f32: the angles take turns in reading one of three axes.

    Of the time axis are all that neither the rows nor the columns have: entries 1, 4, ... below three times the rows'
    section and 2, 5, ... below three times the columns'.

    Args:
        positions: [B, P, 3] int64: time, row, column.
        config: for theta, the sections and the size of a head.
    """
    rope, size = config.rope_parameters, config.head_dim
    axis = torch.zeros(size // 2, dtype=torch.long, device=positions.device)
    for number in (1, 2):
        axis[number : 3 * rope["mrope_section"][number] : 3] = number
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    return _doubled(positions[..., axis] * (1 / rope["rope_theta"] ** exponents))


def _doubled(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Dimensions i and i + half of a head turn together."""
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class _Patches(nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.patch_embed = Qwen3VLVisionPatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)

    def forward(self, state: State) -> State:
        # The convolution's windows are the patches, one each.
        patches, grid, embed = state["patches"], state["grid"], self.patch_embed.proj
        hidden = F.linear(patches.to(embed.weight.dtype), embed.weight.flatten(1), embed.bias)
        places = patch_places(grid, patches.shape[1])
        return {"hidden": hidden + interpolated(self.pos_embed, places, grid).to(hidden.dtype), "grid": grid}


class _Block(nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.block = Qwen3VLVisionBlock(config)

    def forward(self, state: State) -> State:
        hidden = state["hidden"]
        count, patches, _ = hidden.shape
        cos, sin = tower_rope(patch_places(state["grid"], patches), self.head_dim)
        # Pictures lie behind each other; on the CPU, where the block asks for the lengths, for a GPU not to wait.
        ends = torch.arange(0, count * patches + 1, patches)
        rope = cos.flatten(0, 1), sin.flatten(0, 1)
        turned = self.block(hidden.flatten(0, 1), cu_seqlens=ends, position_embeddings=rope)
        return state | {"hidden": turned.view_as(hidden)}


class _Features(nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.merger = Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=True)

    def forward(self, state: State) -> State:
        features = self.merger(state["hidden"]).unflatten(0, (len(state["hidden"]), -1))
        before = [state["deepstack"]] if "deepstack" in state else []
        return state | {"deepstack": torch.cat([*before, features], dim=-1)}


class _Merge(nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.merger = Qwen3VLVisionPatchMerger(config)

    def forward(self, state: State) -> State:
        hidden = state["hidden"]
        features = {name: state[name] for name in ("deepstack",) if name in state}
        return {"vision": self.merger(hidden).unflatten(0, (len(hidden), -1))} | features


class _Embed(nn.Module):
    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, state: State) -> State:
        hidden = self.embed_tokens(state["ids"])
        put(hidden, state["vision_at"], state["vision"])
        others = {name: tensor for name, tensor in state.items() if name not in ("ids", "vision")}
        return {"hidden": hidden} | others


class _Layer(nn.Module):
    """Causal, so that padding on the right needs no mask: its rows mean nothing, and no other row reads them."""

    def __init__(self, config: Qwen3VLTextConfig, number: int, features: int, last: bool) -> None:
        super().__init__()
        self.config, self.number, self.features, self.last = config, number, features, last
        self.layer = Qwen3VLTextDecoderLayer(config, number)

    def forward(self, state: State) -> State:
        hidden = state["hidden"]
        cos, sin = text_rope(state["positions"], self.config)
        hidden = self.layer(hidden, position_embeddings=(cos.to(hidden.dtype), sin.to(hidden.dtype)))
        if self.number < self.features:
            put(hidden, state["vision_at"], state["deepstack"].chunk(self.features, -1)[self.number], add=True)
        if self.last:
            return {"rows": hidden}
        # Features may be larger than all else: no further layer carries them.
        done = ("vision_at", "deepstack") if self.number + 1 >= self.features else ()
        return {name: it for name, it in state.items() if name not in done} | {"hidden": hidden}


class _Norm(nn.Module):
    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__()
        self.norm = Qwen3VLTextRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, state: State) -> State:
        return {"rows": self.norm(state["hidden"])}


class Qwen3Vl:
    """Rows are one for each token.

    contract: what it is read by.
    dim: D.
    vision_dim: D too, of the rows that the tower gives.
    widths: what the tower makes of a picture and the text stack reads, and the sizes of its rows.
    ids: number of its token embeddings.
    dtype: of its weights and of what it reads of pictures.
    weights: what both lists of parts are read from.
    vision_parts: the tower. The first reads {"patches": [B, N, C], "grid": [B, 2] int64, rows and columns of patches},
        the last gives {"vision": [B, n, D]} and, of a whole model, {"deepstack": [B, n, K * D]}.
    parts: the text stack. The first reads what `batch` makes, the last gives {"rows": [B, P, D]}.
    """

    rows = None
    vocabulary = None

    def __init__(self, config: Qwen3VLConfig, weights: Weights, dtype: torch.dtype, contract: Contract) -> None:
        text, vision = config.text_config, config.vision_config
        self.contract, self.weights = contract, weights
        self.dim: int = text.hidden_size
        self.vision_dim: int = vision.out_hidden_size
        self.ids: int = text.vocab_size
        inner = list(vision.deepstack_visual_indexes) if contract.whole else []
        self.widths = {"vision": self.dim} | ({"deepstack": len(inner) * self.dim} if inner else {})
        self.dtype = dtype
        prefix = weights.prefix(*EMBEDDINGS)
        self.vision_parts = _vision_parts(vision, f"{prefix}visual.", dtype, inner)
        self.parts = _text_parts(text, f"{prefix}language_model.", dtype, len(inner), not contract.whole)

    def batch(self, prompts: Sequence[Prompt], pictures: Sequence[Sequence[State]]) -> State:
        """The state of a batch of samples for the first of `parts`.

        Args:
            prompts: each sample's tokens.
            pictures: of each sample, what the tower's last part gave for each of its pictures, without the batch
                dimension: {"vision": [n, D], ...}.

        Returns:
            {"ids": [B, P] int64, "positions": [B, P, 3] int64, "vision_at": [B, V] int64, -1 for padding, "vision":
            [B, V, D]} and, of a whole model, {"deepstack": [B, V, K * D]}; padded on the right, V the most that a
            sample of the batch has, which may be 0.
        """
        positions = pad_sequence([self._positions(prompt) for prompt in prompts], batch_first=True)
        return {"positions": positions} | spliced(prompts, pictures, self.widths, self.dtype)

    def _positions(self, prompt: Prompt) -> Tensor:
        """[P, 3] int64: time, row and column of each token.

        A whole model's text advances all three. A picture's tokens have the time of its first one, and rows and
        columns counted from there; the text behind it goes on behind the longer side.
        """
        length = len(prompt.ids)
        if not self.contract.whole:
            return _steps(0, length)
        pieces, end, time = [], 0, 0
        for slots in prompt.pictures:
            pieces.append(_steps(time, slots.start - end))
            time += slots.start - end
            rows, columns = torch.arange(slots.rows), torch.arange(slots.columns)
            pieces.append(time + torch.cartesian_prod(torch.zeros(1, dtype=torch.long), rows, columns))
            time += max(slots.rows, slots.columns)
            end = slots.end
        return torch.cat([*pieces, _steps(time, length - end)])


def _steps(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count)[:, None].expand(-1, 3)


def spliced(
    prompts: Sequence[Prompt], pictures: Sequence[Sequence[State]], widths: dict[str, int], dtype: torch.dtype
) -> State:
    """A batch of samples, padded on the right.

    Args:
        prompts: each sample's tokens.
        pictures: of each sample, what a tower made of each of its pictures, without the batch dimension.
        widths: the names and row sizes of that.
        dtype: of it.

    Returns:
        {"ids": [B, P] int64, "vision_at": [B, V] int64, the position of each row of a picture, -1 for padding} and each
        of `widths`, [B, V, width].
    """
    state = {
        "ids": pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], batch_first=True),
        "vision_at": pad_sequence(
            [torch.from_numpy(prompt.under_pictures) for prompt in prompts], batch_first=True, padding_value=-1
        ),
    }
    for name, width in widths.items():
        none = torch.empty(0, width, dtype=dtype)
        rows = [torch.cat([none, *(picture[name] for picture in sample)]) for sample in pictures]
        state[name] = pad_sequence(rows, batch_first=True)
    return state


def _vision_parts(config: Qwen3VLVisionConfig, prefix: str, dtype: torch.dtype, inner: list[int]) -> list[Part]:
    patches, block, features, merge = (
        teachers.on_meta(kind, config, dtype=dtype) for kind in (_Patches, _Block, _Features, _Merge)
    )
    parts = [Part("patches", patches, teachers.sources(patches, prefix))]
    for number in range(config.depth):
        parts.append(_part(f"block {number}", block, "block", f"{prefix}blocks.{number}."))
        if number in inner:
            stored = f"{prefix}deepstack_merger_list.{inner.index(number)}."
            parts.append(_part(f"features {number}", features, "merger", stored))
    return [*parts, _part("merger", merge, "merger", f"{prefix}merger.")]


def _text_parts(config: Qwen3VLTextConfig, prefix: str, dtype: torch.dtype, features: int, norm: bool) -> list[Part]:
    embed = teachers.on_meta(_Embed, config, dtype=dtype)
    parts = [Part("embeddings", embed, teachers.sources(embed, prefix))]
    for number in range(config.num_hidden_layers):
        last = not norm and number + 1 == config.num_hidden_layers
        layer = teachers.on_meta(_Layer, config, number, features, last, dtype=dtype)
        parts.append(_part(f"layer {number}", layer, "layer", f"{prefix}layers.{number}."))
    if norm:
        parts.append(_part("final norm", teachers.on_meta(_Norm, config, dtype=dtype), "norm", f"{prefix}norm."))
    return parts


def _part(name: str, module: nn.Module, child: str, prefix: str) -> Part:
    """A part whose one child is stored after `prefix`."""
    sources = teachers.sources(module.get_submodule(child), prefix)
    return Part(name, module, {f"{child}.{parameter}": stored for parameter, stored in sources.items()})


def load(path: Path, dtype: torch.dtype, contract: Contract) -> Qwen3Vl:
    """Describe the teacher of a snapshot; its weights stay in their files.

    Raises:
        TrainerError: the snapshot is incomplete or of another kind of model, or the dtype is f16.
    """
    if dtype == torch.float16:
        raise TrainerError(
            "a Qwen3-VL teacher was trained in bf16 and may overflow in f16; set precompute.teacher_dtype to auto, "
            "bf16 or f32"
        )
    config = teachers.read_config(Qwen3VLConfig, path)
    text, vision = config.text_config, config.vision_config
    for name, found, needed in (
        ("text_config.rope_parameters.rope_type", text.rope_parameters["rope_type"], "default"),
        ("vision_config.patch_size", vision.patch_size, PATCH),
        ("vision_config.spatial_merge_size", vision.spatial_merge_size, MERGE),
        ("vision_config.temporal_patch_size", vision.temporal_patch_size, FRAMES),
        ("vision_config.out_hidden_size", vision.out_hidden_size, text.hidden_size),
    ):
        if found != needed:
            raise TrainerError(
                f"{path / 'config.json'} has {found} as {name} where {needed} is needed; set materials.paths.teacher "
                "to a Qwen3-VL Instruct model"
            )
    teacher = Qwen3Vl(config, Weights(path), dtype, contract)
    check(teacher.vision_parts, teacher.weights)
    return teacher
