"""The encoder of T5 v1.1, such as T5-XXL."""

from pathlib import Path

import torch
from tokenizers import Encoding
from torch import nn
from transformers import T5Config, T5Tokenizer
from transformers.models.t5.modeling_t5 import T5Block, T5LayerNorm

from trainer import teachers
from trainer.errors import TrainerError
from trainer.streaming import Part, State
from trainer.weights import Weights

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")


class _Embed(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)

    def forward(self, state: State) -> State:
        return {"hidden": self.tokens(state["ids"]), "lengths": state["lengths"]}


class _Layer(nn.Module):
    """Each layer reads the one table of relative positions for itself: a few kilobytes."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.block = T5Block(config, has_relative_attention_bias=True)

    def forward(self, state: State) -> State:
        return state | {"hidden": self.block(state["hidden"], teachers.mask(self.config, state))[0]}


class _Head(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, state: State) -> State:
        return {"rows": self.norm(state["hidden"])}


class T5:
    """Rows are the encoder's last hidden state.

    A prompt ends with `</s>` (1). What is trained has to be what the engine encodes, which differs from what diffusion
    pipelines do: the empty prompt is "▁" and `</s>` instead of `</s>` alone, and of a run of unknown characters each is
    an `<unk>` instead of all together. Its other differences show only on text that is not plain, which is why the
    corpus is cleaned.
    """

    rows = None

    def __init__(self, config: T5Config, weights: Weights, tokenizer: T5Tokenizer, dtype: torch.dtype) -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.end: int = tokenizer.eos_token_id
        self.unknown: int = tokenizer.unk_token_id
        space = self.tokenizer.token_to_id("▁")
        self.empty: list[int] = [] if space is None else [space]
        self.vocabulary: int = config.vocab_size
        self.dim: int = config.d_model
        self.weights = weights
        self.parts = _parts(config, weights, dtype)

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt, cut to `queries` with the end marker last."""
        encodings = self.tokenizer.encode_batch(prompts, add_special_tokens=False)
        ids = [self._ids(encoding) or self.empty for encoding in encodings]
        return [[*row[: queries - 1], self.end] for row in ids]

    def _ids(self, encoding: Encoding) -> list[int]:
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [id for id, (start, end) in spans for _ in range(end - start if id == self.unknown else 1)]


def _parts(config: T5Config, weights: Weights, dtype: torch.dtype) -> list[Part]:
    prefix = weights.prefix("encoder.final_layer_norm.weight")
    name = next(prefix + name for name in EMBEDDINGS if prefix + name in weights.tensors or name == EMBEDDINGS[-1])
    parts = [Part("embeddings", teachers.on_meta(_Embed, config, dtype=dtype), {"tokens.weight": (name,)})]
    layer = teachers.on_meta(_Layer, config, dtype=dtype)
    positions = "block.layer.0.SelfAttention.relative_attention_bias.weight"
    for number in range(config.num_layers):
        sources = teachers.sources(layer.block, f"{prefix}encoder.block.{number}.")
        sources = {f"block.{name}": stored for name, stored in sources.items()}
        sources[positions] = (positions.replace("block.", f"{prefix}encoder.block.0.", 1),)
        parts.append(Part(f"layer {number}", layer, sources))
    norm = {"norm.weight": (f"{prefix}encoder.final_layer_norm.weight",)}
    return [*parts, Part("final norm", teachers.on_meta(_Head, config, dtype=dtype), norm)]


def load(path: Path, dtype: torch.dtype) -> T5:
    """The encoder and its tokenizer (spiece.model or tokenizer.json) from a snapshot.

    Raises:
        TrainerError: the snapshot is incomplete, or the dtype is f16.
    """
    if dtype == torch.float16:
        raise TrainerError(
            "the activations of a T5 teacher overflow in f16; set precompute.teacher_dtype to auto, bf16 or f32"
        )
    # transformers makes up a tokenizer of special tokens only where there is no file.
    if not any((path / name).is_file() for name in ("spiece.model", "tokenizer.json")):
        raise TrainerError(f"the teacher in {path} has neither spiece.model nor tokenizer.json; get it again")
    try:
        tokenizer = T5Tokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever the sentencepiece and tokenizers libraries raise for a damaged file
        raise TrainerError(f"the T5 tokenizer in {path} cannot be loaded ({error}); get it again") from error
    config = teachers.read_config(T5Config, path)
    teachers.check_vocabulary(path, len(tokenizer), config.vocab_size)
    return T5(config, Weights(path), tokenizer, dtype)
