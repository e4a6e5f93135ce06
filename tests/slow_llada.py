"""LLaDA-Image-Turbo's rows by its published equations, step by step: row by row, head by head, expert by expert.

In f64 with numpy, from the stored tensors and configs alone; it shares nothing with the teacher it is there to check.
"""

import json
from math import pi, sqrt
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Vector = np.ndarray


class Stored:
    """A component: its config and tensors by their stored names."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= {name: value.astype(np.float64) for name, value in load_file(file).items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def affine(self, name: str, x: Vector) -> Vector:
        return self[f"{name}.weight"] @ x + self[f"{name}.bias"]


def rows(folder: Path, ids: list[int]) -> np.ndarray:
    """The rows of one prompt, [queries, projection_dim]."""
    text_encoder = Stored(folder / "text_encoder")
    text = [text_encoder["model.word_embeddings.weight"][id] for id in ids]
    queries = query_former(Stored(folder / "queryformer"), text)
    hidden = backbone(text_encoder, text, queries)
    return np.stack(text_projection(Stored(folder / "text_projection"), hidden)[len(ids) :])


def query_former(stored: Stored, text: list[Vector]) -> list[Vector]:
    config = stored.config
    size, heads, eps = config["hidden_size"], config["num_attention_heads"], config["norm_eps"]
    queries = list(stored["meta_queries"])
    for n in range(config["num_hidden_layers"]):
        name = f"query_blocks.{n}"
        weight, bias = stored[f"{name}.cross_attn.in_proj_weight"], stored[f"{name}.cross_attn.in_proj_bias"]
        queries = [layer_norm(x, eps) for x in queries]
        read = [layer_norm(x, eps) for x in text]
        q = [weight[:size] @ x + bias[:size] for x in queries]
        k = [weight[size : 2 * size] @ x + bias[size : 2 * size] for x in read]
        v = [weight[2 * size :] @ x + bias[2 * size :] for x in read]
        for i in range(len(queries)):
            joined = np.concatenate([attend(head(q[i], h, heads), k, v, h, heads) for h in range(heads)])
            x = layer_norm(queries[i] + stored.affine(f"{name}.cross_attn.out_proj", joined), eps)
            queries[i] = x + stored.affine(f"{name}.mlp.fc2", gelu(stored.affine(f"{name}.mlp.fc1", x)))
    return queries


def backbone(stored: Stored, text: list[Vector], queries: list[Vector]) -> list[Vector]:
    """All rows after the final norm."""
    config = stored.config
    eps, heads, shared = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config["head_dim"]
    x = [*text, *queries]
    for n in range(config["num_hidden_layers"]):
        name = f"model.layers.{n}"
        q, k, v = [], [], []
        for position, row in enumerate(x):
            normed = rms_norm(row, eps) * stored[f"{name}.input_layernorm.weight"]
            parts = (stored[f"{name}.attention.query_key_value.weight"] @ normed).reshape(-1, width)
            of_query, of_key = parts[:heads], parts[heads : heads + shared]
            query_norm = stored[f"{name}.attention.query_layernorm.weight"]
            key_norm = stored[f"{name}.attention.key_layernorm.weight"]
            q.append([rope(rms_norm(part, eps) * query_norm, position, config) for part in of_query])
            k.append(np.concatenate([rope(rms_norm(part, eps) * key_norm, position, config) for part in of_key]))
            v.append(parts[heads + shared :].reshape(-1))
        for i in range(len(x)):
            seen = len(text) if i < len(text) else len(x)
            joined = np.concatenate(
                [attend(q[i][h], k[:seen], v[:seen], h // (heads // shared), shared) for h in range(heads)]
            )
            x[i] = x[i] + stored[f"{name}.attention.dense.weight"] @ joined
        for i in range(len(x)):
            normed = rms_norm(x[i], eps) * stored[f"{name}.post_attention_layernorm.weight"]
            if n < config["first_k_dense_replace"]:
                x[i] = x[i] + swiglu(stored, f"{name}.mlp", normed)
            else:
                x[i] = x[i] + mixture(stored, f"{name}.mlp", normed)
    return [rms_norm(row, eps) * stored["model.norm.weight"] for row in x]


def route(stored: Stored, name: str, x: Vector) -> dict[int, float]:
    """The chosen experts of a row and their weights."""
    config = stored.config
    scores = 1 / (1 + np.exp(-(stored[f"{name}.gate.weight"] @ x)))
    biased = scores + stored[f"{name}.gate.expert_bias"]
    members = config["num_experts"] // config["n_group"]
    groups = [list(range(g * members, (g + 1) * members)) for g in range(config["n_group"])]
    groups.sort(key=lambda group: sum(sorted(biased[e] for e in group)[-2:]), reverse=True)
    candidates = [expert for group in groups[: config["topk_group"]] for expert in group]
    candidates.sort(key=lambda expert: biased[expert], reverse=True)
    chosen = candidates[: config["num_experts_per_tok"]]
    total = sum(scores[expert] for expert in chosen) + 1e-20
    return {expert: scores[expert] / total * config["routed_scaling_factor"] for expert in chosen}


def mixture(stored: Stored, name: str, x: Vector) -> Vector:
    result = swiglu(stored, f"{name}.shared_experts", x)
    for expert, weight in route(stored, name, x).items():
        result = result + weight * swiglu(stored, f"{name}.experts.{expert}", x)
    return result


def swiglu(stored: Stored, name: str, x: Vector) -> Vector:
    gate = stored[f"{name}.gate_proj.weight"] @ x
    return stored[f"{name}.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (stored[f"{name}.up_proj.weight"] @ x))


def text_projection(stored: Stored, x: list[Vector]) -> list[Vector]:
    config = stored.config
    heads, eps = config["num_attention_heads"], config["norm_eps"]
    for n in range(config["num_hidden_layers"]):
        name = f"layers.{n}"
        normed = [rms_norm(row, eps) for row in x]
        q = [stored.affine(f"{name}.self_attn.q_proj", row) for row in normed]
        k = [stored.affine(f"{name}.self_attn.k_proj", row) for row in normed]
        v = [stored.affine(f"{name}.self_attn.v_proj", row) for row in normed]
        k = [np.concatenate([rms_norm(head(row, h, heads), eps) for h in range(heads)]) for row in k]
        for i in range(len(x)):
            joined = [attend(rms_norm(head(q[i], h, heads), eps), k, v, h, heads) for h in range(heads)]
            x[i] = x[i] + stored.affine(f"{name}.self_attn.out_proj", np.concatenate(joined))
        for i in range(len(x)):
            inner = gelu(stored.affine(f"{name}.mlp.fc1", rms_norm(x[i], eps)))
            x[i] = x[i] + stored.affine(f"{name}.mlp.fc2", inner)
    return [stored.affine("projector", row) for row in x]


def head(x: Vector, number: int, heads: int) -> Vector:
    width = len(x) // heads
    return x[number * width : (number + 1) * width]


def attend(query: Vector, keys: list[Vector], values: list[Vector], number: int, heads: int) -> Vector:
    """One head of one row; `number` is that of the head among those of keys and values."""
    scores = [query @ head(key, number, heads) / sqrt(len(query)) for key in keys]
    exponentials = [np.exp(score - max(scores)) for score in scores]
    weighted = [e * head(value, number, heads) for e, value in zip(exponentials, values, strict=True)]
    return sum(weighted) / sum(exponentials)


def rope(x: Vector, position: int, config: dict) -> Vector:
    """Turn dimensions i and i + r/2 of the first r by position * theta^(-2i/r)."""
    turning = int(config["head_dim"] * config["partial_rotary_factor"])
    result = x.copy()
    for i in range(turning // 2):
        angle = position * config["rope_theta"] ** (-2 * i / turning)
        first, second = x[i], x[i + turning // 2]
        result[i] = first * np.cos(angle) - second * np.sin(angle)
        result[i + turning // 2] = second * np.cos(angle) + first * np.sin(angle)
    return result


def rms_norm(x: Vector, eps: float) -> Vector:
    return x / sqrt(np.mean(x * x) + eps)


def layer_norm(x: Vector, eps: float) -> Vector:
    return (x - x.mean()) / sqrt(x.var() + eps)


def gelu(x: Vector) -> Vector:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
