"""The LLaDA2-MoE backbone, written from its published equations and the names of its stored tensors.

Its input is a batch of sequences [text, padded on the right ; queries]. The text reads the text, the queries read all.
Shapes: B prompts, P text rows, Q query rows, S = P + Q, H hidden size, N = B * S rows, E experts, k of them for a row.
"""

from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from trainer.errors import TrainerError
from trainer.streaming import State
from trainer.teachers.configs import ModelConfig


class Config(ModelConfig):
    """The backbone's config.json."""

    model_type: Literal["llada2_moe"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    intermediate_size: PositiveInt
    first_k_dense_replace: int = Field(ge=0)
    moe_intermediate_size: PositiveInt
    num_experts: PositiveInt
    num_shared_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    routed_scaling_factor: PositiveFloat
    rope_theta: float
    partial_rotary_factor: float = Field(gt=0, le=1)
    rope_type: Literal["default"] = "default"
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: Literal["silu"] = "silu"
    score_function: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: Literal[True] = True
    use_qk_norm: Literal[True] = True
    use_qkv_bias: Literal[False] = False
    use_bias: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _lift_rope(cls, values: Any) -> Any:
        """Versions of transformers differ in where the values of rope are; a group of them counts before the rest."""
        if not isinstance(values, dict):
            return values
        for group in (values.get("rope_scaling"), values.get("rope_parameters")):
            if isinstance(group, dict):
                values = values | {key: group[key] for key in ("rope_theta", "partial_rotary_factor") if key in group}
                kind = group.get("rope_type", group.get("type", "default"))
                if kind != "default":
                    values["rope_type"] = kind
        return values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        members, rest = divmod(self.num_experts, self.n_group)
        if rest or members < 2:
            raise ValueError(f"{self.num_experts} experts do not make {self.n_group} equal groups of two or more")
        if self.topk_group > self.n_group or self.num_experts_per_tok > self.topk_group * members:
            raise ValueError(
                f"{self.num_experts_per_tok} experts cannot be chosen from {self.topk_group} of {self.n_group} groups"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key and value heads"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rope cannot rotate {self.rotary_dim} of {self.head_dim} dimensions in pairs")
        return self

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rope rotates."""
        return int(self.head_dim * self.partial_rotary_factor)


def rope_table(theta: float, rotary_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angles a position adds, theta^(-2i / rotary_dim) for i below rotary_dim / 2; f32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return theta**-exponents


def check_rope(table: Tensor, config: Path) -> None:
    """Refuse a rope table that no such model was trained with.

    A wrong one shows in nothing else: the rows look sane, but adapters that learn them stay poor.

    Args:
        table: as of `rope_table`.
        config: the file its values are from.

    Raises:
        TrainerError: it does not start with 1 or does not fall from entry to entry.
    """
    if not (table.isfinite().all() and table[0] == 1 and (table.diff() < 0).all()):
        values = ", ".join(f"{value:.4g}" for value in table[:3].tolist())
        raise TrainerError(
            f"{config} gives a rope table ({values}, ...) that does not start with 1 and fall from entry to entry; "
            "correct its rope_theta or get the teacher again"
        )


def kept(lengths: Tensor, text: int, queries: int) -> Tensor:
    """[B, text + queries] bool: what is not padding."""
    return F.pad(torch.arange(text, device=lengths.device) < lengths[:, None], (0, queries), value=True)


def positions(lengths: Tensor, text: int, queries: int) -> Tensor:
    """[B, text + queries] int64: 0, 1, ... over the text, which the queries continue after its last real row."""
    of_text = torch.arange(text, device=lengths.device).expand(len(lengths), -1)
    return torch.cat([of_text, lengths[:, None] + torch.arange(queries, device=lengths.device)], dim=1)


def visible(lengths: Tensor, text: int, queries: int) -> Tensor:
    """[B, S, S] bool: which columns a row reads. None reads padding, and the text does not read the queries."""
    is_query = torch.arange(text + queries, device=lengths.device) >= text
    return kept(lengths, text, queries)[:, None] & (is_query[:, None] | ~is_query)


def rms(x: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension without weights, computed in f32, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads * D] to [B, heads, S, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, heads, S, D] to [B, S, heads * D]."""
    return x.transpose(1, 2).flatten(-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate dimensions i and i + r/2 of the first r of each head, in f32.

    Args:
        x: [B, heads, S, D].
        angles: [B, S, r/2].
    """
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turning, still = x.split([2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]], dim=-1)
    first, second = turning.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), still], dim=-1)


class Embedding(nn.Module):
    """{"ids", "lengths"} to {"hidden": [B, P, H], "lengths"}."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)

    def forward(self, state: State) -> State:
        """Look up the ids."""
        return {"hidden": self.word_embeddings(state["ids"]), "lengths": state["lengths"]}


class RMSNorm(nn.Module):
    """`rms`, then times a weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms(x, self.eps) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with RMS-normed, partly rotated queries and keys."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        width = config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, (heads + 2 * shared) * width, bias=False, dtype=dtype)
        self.query_layernorm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.key_layernorm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.dense = nn.Linear(heads * width, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        """Attend where mask [B, S, S] is true."""
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        projected = split_heads(self.query_key_value(x), heads + 2 * shared)
        query, key, value = projected.split([heads, shared, shared], dim=1)
        query = rotate(self.query_layernorm(query), angles)
        key = rotate(self.key_layernorm(key), angles)
        # CUDA's attention with a mask has no memory-saving kernel for shared heads: each gets its own copy.
        key, value = (part.repeat_interleave(heads // shared, dim=1) for part in (key, value))
        return self.dense(join_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses k experts for each row, by sigmoid scores within the best groups of experts. All of it in f32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.expert_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [N, k] int64 and their weights [N, k] f32 for rows [N, H]."""
        scores = F.linear(rows.float(), self.weight).sigmoid()
        # The bias, which spreads the load, has its say in the choice alone.
        groups = (scores + self.expert_bias).unflatten(-1, (self.config.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1).indices
        stays = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=rows.device).scatter(-1, best, True)
        candidates = groups.masked_fill(~stays[..., None], -torch.inf).flatten(-2)
        chosen = candidates.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.routed_scaling_factor


class Experts(nn.Module):
    """All routed experts of a layer, each a SwiGLU, as stacks of matrices."""

    def __init__(self, experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate, dtype=dtype))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts.

        Args:
            rows: [N, H].
            chosen: [N, k] experts of each row.
            weights: [N, k] f32.
        """
        choices = chosen.shape[1]
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down), device=rows.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        gate, up = grouped_mm(rows[order // choices], self.gate_up, ends).chunk(2, dim=-1)
        results = grouped_mm(F.silu(gate) * up, self.down, ends)
        # Each row collects its results in the order of its choices: the same sum in every run and every batch.
        places = order.argsort().view_as(chosen)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for n in range(choices):
            total.addcmul_(results[places[:, n]].float(), weights[:, n, None])
        return total.to(rows.dtype)


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows of group g times the transposed matrix g.

    Args:
        rows: [M, I], those of a group one after another.
        matrices: [G, O, I].
        ends: [G] int32, ascending: the end of each group.

    Returns:
        [M, O].
    """
    if _has_grouped_mm(rows):
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    return padded_mm(rows, matrices, ends)


def _has_grouped_mm(rows: Tensor) -> bool:
    if not hasattr(F, "grouped_mm") or rows.shape[1] * rows.element_size() % 16:
        return False  # torch before 2.10, or rows that do not start at multiples of 16 bytes
    return rows.device.type == "cpu" or torch.cuda.get_device_capability(rows.device)[0] >= 8


def padded_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` where torch has none: groups padded to the largest, as many at once as are no more than the rows."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    largest = max(int(counts.max()), 1)
    slots = torch.arange(largest, device=rows.device)
    result = rows.new_empty(len(rows), matrices.shape[1])
    for groups in torch.arange(len(ends), device=rows.device).split(max(len(rows) // largest, 1)):
        places = (ends - counts)[groups, None] + slots
        real = slots < counts[groups, None]
        products = rows[places.clamp(max=len(rows) - 1)] @ matrices[groups[0] : groups[-1] + 1].transpose(1, 2)
        result[places[real]] = products[real]
    return result


class SparseMlp(nn.Module):
    """The routed experts that each row chose and those that all rows share."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = Experts(config.num_experts, hidden, width, dtype)
        self.shared_experts = Mlp(hidden, width * config.num_shared_experts, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        rows = x.flatten(0, 1)
        return self.experts(rows, *self.gate(rows)).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One layer: state with hidden [B, S, H] to such a state. The first layers have a dense MLP."""

    def __init__(self, config: Config, number: int, queries: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.queries = queries
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.attention = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        is_dense = number < config.first_k_dense_replace
        self.mlp = Mlp(hidden, config.intermediate_size, dtype) if is_dense else SparseMlp(config, dtype)

    def forward(self, state: State) -> State:
        """Attention and MLP, each added to what it read."""
        x, lengths = state["hidden"], state["lengths"]
        layout = lengths, x.shape[1] - self.queries, self.queries
        table = rope_table(self.config.rope_theta, self.config.rotary_dim, x.device)
        angles = positions(*layout)[..., None] * table
        x = x + self.attention(self.input_layernorm(x), angles, visible(*layout))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return {"hidden": x, "lengths": lengths}

    def sources(self, prefix: str) -> dict[str, tuple[str, ...]]:
        """The stored tensors each parameter is made of; their names start with `prefix`."""
        made_of = {name: (prefix + name,) for name, _ in self.named_parameters()}
        if isinstance(self.mlp, SparseMlp):
            experts = [f"{prefix}mlp.experts.{number}." for number in range(self.config.num_experts)]
            pairs = (f"{expert}{name}_proj.weight" for expert in experts for name in ("gate", "up"))
            made_of["mlp.experts.gate_up"] = tuple(pairs)
            made_of["mlp.experts.down"] = tuple(f"{expert}down_proj.weight" for expert in experts)
        return made_of
