"""The student: a small causal language model, read from its GGUF. Its states after the final norm feed the adapter."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from trainer.errors import TrainerError
from trainer.gguf_files import open_gguf
from trainer.packs.base import AdapterPack
from trainer.streaming import put
from trainer.tokenization import StudentTokenizer

Kind = Literal["qwen3", "llama"]

# What the engine has compiled in for a Qwen3 student; it reads no key of the file.
HEAD_DIM, ROPE_THETA, EPS = 128, 1e6, 1e-6
# With this many layers it takes the heads for granted too.
FORCED_LAYERS, FORCED_HEADS = 28, 16

_LLAMA_CPP_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
# Values that are dequantized at once: what a load needs beyond the model itself is this many f32.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class StudentInfo:
    """What the header of a student's GGUF says.

    names: "llama.cpp" or "hf", the scheme its tensors are named by.
    heads, kv_heads: rows of the q and the k projection over `head_dim`.
    head_dim: size of the q-norm; without one what the keys say, or else 128.
    rope_theta, eps: what the keys say, if they do; the engine ignores them.
    keys: the keys that are not arrays.
    tensors: memory-mapped, by transformers' name without `model.`; those with other names are left out.
    """

    path: Path
    architecture: str
    names: Literal["llama.cpp", "hf"]
    hidden: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float | None
    eps: float | None
    keys: dict[str, Any]
    tensors: dict[str, ReaderTensor]


class Student(nn.Module):
    """A frozen causal language model without its head.

    vision_proj: [hidden, D] f32, makes embeddings of what a tower makes of pictures; None where there are none.
    """

    def __init__(self, model: Qwen3Model | LlamaModel, vision_proj: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.vision_proj = model, vision_proj
        self.hidden: int = model.config.hidden_size

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """States after the final norm.

        Args:
            ids: [B, L] int64, padded on the right with any id of the vocabulary.

        Returns:
            [B, L, hidden] in the dtype of the load, on its device. A token sees itself and those before it at
            positions 0..L-1, so that padding on the right needs no mask; rows of padding mean nothing.
        """
        return self.model(input_ids=ids.to(self.model.device), use_cache=False).last_hidden_state

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A step of `trainer.streaming`.

        Args:
            state: {"ids": [B, L]} as `states` takes them; with pictures also {"vision": [B, V, D], "vision_at": [B, V]
                int64, the positions whose embeddings it replaces, -1 for padding}.

        Returns:
            {"rows": [B, L, hidden]}.
        """
        if self.vision_proj is None:
            return {"rows": self.states(state["ids"])}
        embeddings = self.model.embed_tokens(state["ids"])
        put(embeddings, state["vision_at"], F.linear(state["vision"].float(), self.vision_proj))
        return {"rows": self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state}


def inspect(path: Path | str) -> StudentInfo:
    """Read the header of a student's GGUF; no weight is read.

    Raises:
        TrainerError: it is missing, truncated, not a GGUF, or holds no language model.
    """
    path = Path(path)
    reader = open_gguf(path)
    tensors = {name: tensor for tensor in reader.tensors if (name := _canonical(tensor.name))}
    layers = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=-1)
    # The engine takes every size from these.
    sized = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.mlp.gate_proj")
    for name in sized:
        if f"{name}.weight" not in tensors or len(tensors[f"{name}.weight"].shape) != 2:
            raise TrainerError(
                f"student {path} has no matrix {name}.weight (nor its llama.cpp name), so it is no language model of "
                "the Qwen3 or Llama layout; set materials.paths.student to one that is"
            )
    (vocabulary, hidden), (q_rows, _), (k_rows, _), (intermediate, _) = (_shape(tensors[f"{n}.weight"]) for n in sized)
    keys = {name: field.contents() for name, field in reader.fields.items() if GGUFValueType.ARRAY not in field.types}
    architecture = str(keys.get("general.architecture", ""))
    head_dim = _head_dim(tensors, keys, architecture, hidden)
    return StudentInfo(
        path=path,
        architecture=architecture,
        names="llama.cpp" if any(tensor.name == "token_embd.weight" for tensor in reader.tensors) else "hf",
        hidden=hidden,
        vocabulary=vocabulary,
        layers=layers,
        heads=q_rows // head_dim,
        kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        intermediate=intermediate,
        rope_theta=keys.get(f"{architecture}.rope.freq_base"),
        eps=keys.get(f"{architecture}.attention.layer_norm_rms_epsilon"),
        keys=keys,
        tensors=tensors,
    )


def check(info: StudentInfo, pack: AdapterPack, student_dim: int) -> None:
    """Refuse a student that the pack's engine model, or this program, cannot run.

    Args:
        info: what `inspect` said of it.
        pack: the pack it is to serve.
        student_dim: hidden size that the adapter is made for.

    Raises:
        TrainerError: what is wrong with it.
    """
    if info.hidden != student_dim:
        raise TrainerError(
            f"student {info.path} has hidden size {info.hidden}, the {pack.name} pack needs {student_dim}: its engine "
            "model is made for that size; set materials.paths.student to a student of it"
        )
    _check_layout(info, pack.student)


def check_tokenizer(info: StudentInfo, tokenizer: StudentTokenizer) -> None:
    """Refuse a tokenizer with ids that the student has no embedding for.

    Raises:
        TrainerError: the two do not belong together.
    """
    if tokenizer.size > info.vocabulary:
        raise TrainerError(
            f"the tokenizer has ids up to {tokenizer.size - 1}, but student {info.path} has embeddings for "
            f"{info.vocabulary} only: they do not belong together; give the tokenizer of this student"
        )


def embeddings(info: StudentInfo, start: int, stop: int) -> Tensor:
    """Some of a student's token embeddings, [stop - start, hidden] f32."""
    source = info.tensors["embed_tokens.weight"]
    return torch.from_numpy(np.array(dequantize(source.data[start:stop], source.tensor_type), dtype=np.float32))


def load(
    path: Path | str,
    kind: Kind,
    dtype: torch.dtype,
    device: torch.device | str,
    vision_proj: Tensor | None = None,
) -> Student:
    """Load a student from a GGUF of any quantization that the gguf package can undo.

    Weights are converted a piece at a time, so that the peak is one copy in `dtype` and a little more.

    Args:
        path: the GGUF.
        kind: `qwen3` is run as the engine runs it, whatever the keys say; `llama` follows the keys.
        dtype: of the weights and of the states.
        device: where it runs.
        vision_proj: as of `Student`.

    Raises:
        TrainerError: the file is damaged or does not fit `kind`.
    """
    info = inspect(path)
    _check_layout(info, kind)
    config = _config(info, kind)
    with torch.device("meta"):
        model = (Qwen3Model if kind == "qwen3" else LlamaModel)(config)
    interleaved = kind == "llama" and info.names == "llama.cpp"
    heads = {"q_proj": info.heads, "k_proj": info.kv_heads} if interleaved else {}
    weights = {}
    for name in model.state_dict():
        weight = _dequantize(info.tensors[name], dtype, device)
        part = name.split(".")[-2]
        weights[name] = _halves(weight, heads[part]) if part in heads else weight
    model.load_state_dict(weights, assign=True)
    # Its frequencies are no weights: on the meta device they have no values yet.
    model.rotary_emb = type(model.rotary_emb)(config).to(device)
    vision_proj = None if vision_proj is None else vision_proj.to(device)
    return Student(model.eval().requires_grad_(False), vision_proj)


def _canonical(name: str) -> str | None:
    """Transformers' name of a tensor, without `model.`; None for one that is none of the model's."""
    if match := re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name):
        layer, part, leaf = match.groups()
        if part in _LLAMA_CPP_NAMES:
            return (f"layers.{int(layer)}." if layer else "") + f"{_LLAMA_CPP_NAMES[part]}.{leaf}"
    name = name.removeprefix("model.")
    part, _, leaf = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
    return name if part in _LLAMA_CPP_NAMES.values() and leaf in ("weight", "bias") else None


def _head_dim(tensors: dict[str, ReaderTensor], keys: dict[str, Any], architecture: str, hidden: int) -> int:
    if norm := tensors.get("layers.0.self_attn.q_norm.weight"):
        return _shape(norm)[0]
    if length := keys.get(f"{architecture}.attention.key_length"):
        return length
    if heads := keys.get(f"{architecture}.attention.head_count"):
        return hidden // heads
    return HEAD_DIM


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))


def _shapes(info: StudentInfo, kind: Kind) -> dict[str, tuple[int, ...]]:
    """Every tensor that a student of this kind has."""
    hidden, wide, q, kv = info.hidden, info.intermediate, info.heads * info.head_dim, info.kv_heads * info.head_dim
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if kind == "qwen3":
        layer |= {"self_attn.q_norm": (info.head_dim,), "self_attn.k_norm": (info.head_dim,)}
    layers = {f"layers.{n}.{part}.weight": shape for n in range(info.layers) for part, shape in layer.items()}
    return {"embed_tokens.weight": (info.vocabulary, hidden), **layers, "norm.weight": (hidden,)}


def _check_layout(info: StudentInfo, kind: Kind) -> None:
    """Refuse a file that is not, tensor by tensor, a student of this kind."""
    shapes = _shapes(info, kind)
    missing = [name for name in shapes if name not in info.tensors]
    if norms := [name for name in missing if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        raise TrainerError(
            f"student {info.path} has no {norms[0]}: the engine runs plain Qwen3 only, which has q and k norms in "
            "every layer; set materials.paths.student to a Qwen3 GGUF such as pig_clip"
        )
    if "norm.weight" in missing:
        raise TrainerError(
            f"student {info.path} has no final norm (norm.weight, output_norm.weight): adapters read the states after "
            "it; set materials.paths.student to a whole model"
        )
    if missing:
        raise TrainerError(
            f"student {info.path} lacks {_some(missing)}: it is incomplete; set materials.paths.student to a "
            "whole model"
        )
    if biases := [name for name in info.tensors if name.endswith(".bias")]:
        raise TrainerError(
            f"student {info.path} has biases ({_some(biases)}), which a {kind} student has not: it is a model of "
            "another kind, such as Qwen2; set materials.paths.student to one without"
        )
    (_check_qwen3 if kind == "qwen3" else _check_llama)(info)
    for name, shape in shapes.items():
        if _shape(info.tensors[name]) != shape:
            raise TrainerError(
                f"student {info.path}: {name} has the shape {_shape(info.tensors[name])} where the rest of the file "
                f"asks for {shape}; it is damaged or of another architecture, so give another file"
            )
    for tensor in {tensor.tensor_type: tensor for tensor in info.tensors.values()}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise TrainerError(
                f"student {info.path}: {tensor.name} is of the type {tensor.tensor_type.name}, which the gguf package "
                "cannot read; give the student in F16, BF16, Q8_0 or another common type"
            ) from None


def _check_qwen3(info: StudentInfo) -> None:
    if info.head_dim != HEAD_DIM:
        raise TrainerError(
            f"student {info.path} has attention heads of {info.head_dim} dimensions, the engine runs heads of "
            f"{HEAD_DIM} only; set materials.paths.student to a Qwen3 GGUF such as pig_clip"
        )
    if info.layers == FORCED_LAYERS and info.heads != FORCED_HEADS:
        raise TrainerError(
            f"student {info.path} has {FORCED_LAYERS} layers and {info.heads} heads, but the engine takes any student "
            f"of {FORCED_LAYERS} layers for one of {FORCED_HEADS} heads; set materials.paths.student to another"
        )


def _check_llama(info: StudentInfo) -> None:
    if info.architecture != "llama" or info.eps is None or f"{info.architecture}.attention.head_count" not in info.keys:
        raise TrainerError(
            f"student {info.path} has the architecture {info.architecture or 'unknown'!r}, or lacks its keys "
            "llama.attention.head_count and llama.attention.layer_norm_rms_epsilon; give a GGUF of the architecture "
            "llama as llama.cpp writes it"
        )
    scaling = info.keys.get("llama.rope.scaling.type", "none")
    partial = info.keys.get("llama.rope.dimension_count", info.head_dim) != info.head_dim
    factors = any(tensor.name == "rope_freqs.weight" for tensor in open_gguf(info.path).tensors)
    if scaling != "none" or partial or factors:
        raise TrainerError(
            f"student {info.path} scales its rope or rotates only a part of each head, which is not supported here; "
            "give a plain Llama such as SmolLM2"
        )


def _some(names: Iterable[str]) -> str:
    """The first names of a list and how many more there are."""
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else first


def _config(info: StudentInfo, kind: Kind) -> Qwen3Config | LlamaConfig:
    shape = {
        "vocab_size": info.vocabulary,
        "hidden_size": info.hidden,
        "intermediate_size": info.intermediate,
        "num_hidden_layers": info.layers,
        "num_attention_heads": info.heads,
        "num_key_value_heads": info.kv_heads,
        "head_dim": info.head_dim,
    }
    if kind == "qwen3":
        return Qwen3Config(
            **shape, rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}
        )
    # 10000 is llama.cpp's value where the key is absent.
    theta = info.rope_theta or 10000.0
    return LlamaConfig(**shape, rms_norm_eps=info.eps, rope_parameters={"rope_type": "default", "rope_theta": theta})


def _dequantize(source: ReaderTensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """One weight in `dtype`, with no more than `_CHUNK` values in f32 at a time."""
    shape = _shape(source)
    data = np.atleast_2d(source.data)
    weight = torch.empty((len(data), shape[-1]), dtype=dtype, device=device)
    step = max(1, _CHUNK // shape[-1])
    for start in range(0, len(data), step):
        values = dequantize(data[start : start + step], source.tensor_type)
        # A copy: of an F32 tensor these are the read-only bytes of the file.
        weight[start : start + step] = torch.from_numpy(np.array(values, dtype=np.float32))
    return weight.view(shape)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows in the architecture `llama`.

    Its rope turns neighbouring dimensions (2i, 2i + 1) of a head, transformers' turns i and i + head_dim / 2.
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
