"""What LLaDA-Image has around its backbone: the QueryFormer before it, the text projection behind it.

Written from the published equations and the names of the stored tensors. Shapes as in `llada2_moe`.
"""

from typing import Self

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from trainer.streaming import State
from trainer.teachers.configs import ModelConfig
from trainer.teachers.llada2_moe import RMSNorm, join_heads, kept, rms, split_heads


class _AttentionConfig(ModelConfig):
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    norm_eps: PositiveFloat

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.hidden_size} dimensions do not make {self.num_attention_heads} equal heads")
        return self


class QueryFormerConfig(_AttentionConfig):
    """The QueryFormer's config.json."""

    num_queries: PositiveInt


class ProjectionConfig(_AttentionConfig):
    """The text projection's config.json."""

    projection_dim: PositiveInt


class Mlp(nn.Module):
    """Two layers with a GELU (tanh) between them."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate, dtype=dtype)
        self.fc2 = nn.Linear(intermediate, hidden, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CrossAttention(nn.Module):
    """Attention of queries to keys that are also the values; stored the way of torch's MultiheadAttention."""

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * hidden, dtype=dtype))
        self.out_proj = nn.Linear(hidden, hidden, dtype=dtype)

    def forward(self, queries: Tensor, keys: Tensor, keep: Tensor) -> Tensor:
        """Attend from [B, Q, H] to the rows of [B, P, H] where keep [B, P] is true."""
        inputs = (queries, keys, keys)
        projections = zip(self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        query, key, value = (
            split_heads(F.linear(x, weight, bias), self.heads)
            for x, (weight, bias) in zip(inputs, projections, strict=True)
        )
        mask = keep[:, None, None]
        return self.out_proj(join_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)))


class QueryBlock(nn.Module):
    """Queries read the text. What is added to is normed, too."""

    def __init__(self, config: QueryFormerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.cross_attn = CrossAttention(config.hidden_size, config.num_attention_heads, dtype)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, queries: Tensor, text: Tensor, keep: Tensor) -> Tensor:
        """[B, Q, H] to [B, Q, H]."""
        queries = self._norm(queries)
        queries = self._norm(queries + self.cross_attn(queries, self._norm(text), keep))
        return queries + self.mlp(queries)

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


class QueryFormer(nn.Module):
    """State with hidden [B, P, H], the embedded text, to one with hidden [B, P + Q, H]: the queries follow it."""

    def __init__(self, config: QueryFormerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.meta_queries = nn.Parameter(torch.empty(config.num_queries, config.hidden_size, dtype=dtype))
        self.query_blocks = nn.ModuleList(QueryBlock(config, dtype) for _ in range(config.num_hidden_layers))

    def forward(self, state: State) -> State:
        """Let the queries read the text."""
        text, lengths = state["hidden"], state["lengths"]
        keep = kept(lengths, text.shape[1], 0)
        queries = self.meta_queries.expand(len(text), -1, -1)
        for block in self.query_blocks:
            queries = block(queries, text, keep)
        return {"hidden": torch.cat([text, queries], dim=1), "lengths": lengths}


class SelfAttention(nn.Module):
    """Attention with queries and keys that are RMS-normed in each head."""

    def __init__(self, config: ProjectionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.eps = config.num_attention_heads, config.norm_eps
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype))

    def forward(self, x: Tensor, rows: int, keep: Tensor) -> Tensor:
        """Attend from the last `rows` of x [B, S, H] to those where keep [B, S] is true."""
        query = rms(split_heads(self.q_proj(x[:, -rows:]), self.heads), self.eps)
        key = rms(split_heads(self.k_proj(x), self.heads), self.eps)
        value = split_heads(self.v_proj(x), self.heads)
        mask = keep[:, None, None]
        return self.out_proj(join_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)))


class ProjectionLayer(nn.Module):
    """Attention and MLP of RMS-normed rows, each added to what it read."""

    def __init__(self, config: ProjectionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.self_attn = SelfAttention(config, dtype)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, x: Tensor, rows: int, keep: Tensor) -> Tensor:
        """The last `rows` of [B, S, H]."""
        x = x[:, -rows:] + self.self_attn(rms(x, self.eps), rows, keep)
        return x + self.mlp(rms(x, self.eps))


class TextProjection(nn.Module):
    """State with the backbone's hidden [B, P + Q, H] to {"rows": [B, Q, projection_dim]}, after the backbone's norm."""

    def __init__(self, config: ProjectionConfig, norm: RMSNorm, queries: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.queries = queries
        self.norm = norm
        self.layers = nn.ModuleList(ProjectionLayer(config, dtype) for _ in range(config.num_hidden_layers))
        self.projector = nn.Linear(config.hidden_size, config.projection_dim, dtype=dtype)

    def forward(self, state: State) -> State:
        """All rows up to the last layer, which needs only those of the queries."""
        x = self.norm(state["hidden"])
        sequence = x.shape[1]
        keep = kept(state["lengths"], sequence - self.queries, self.queries)
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, sequence, keep)
        return {"rows": self.projector(last(x, self.queries, keep))}
