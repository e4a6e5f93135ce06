"""BERT encoders, such as all-MiniLM-L6-v2."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

from trainer import teachers
from trainer.errors import TrainerError
from trainer.streaming import Part, State
from trainer.weights import Weights

EMBEDDINGS = ("embeddings.word_embeddings.weight",)


class _Embed(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)

    def forward(self, state: State) -> State:
        ids = state["ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.embeddings(ids, token_type_ids=torch.zeros_like(ids), position_ids=positions)
        return {"hidden": hidden, "lengths": state["lengths"]}


class _Layer(nn.Module):
    def __init__(self, config: BertConfig, last: bool) -> None:
        super().__init__()
        self.config, self.last = config, last
        self.layer = BertLayer(config)

    def forward(self, state: State) -> State:
        hidden = self.layer(state["hidden"], teachers.mask(self.config, state))
        return {"rows": hidden} if self.last else state | {"hidden": hidden}


class Bert:
    """Rows are the last hidden state; a prompt is `[CLS]` ... `[SEP]`."""

    rows = None

    def __init__(self, config: BertConfig, weights: Weights, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
        self.vocabulary: int = config.vocab_size
        self.dim: int = config.hidden_size
        self.weights = weights
        self.parts = _parts(config, weights, dtype)

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt, cut to `queries` (2 or more) with the end marker last."""
        encodings = self.tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        return [[self.start, *encoding.ids[: queries - 2], self.end] for encoding in encodings]


def _parts(config: BertConfig, weights: Weights, dtype: torch.dtype) -> list[Part]:
    prefix = weights.prefix(*EMBEDDINGS)
    embed = teachers.on_meta(_Embed, config, dtype=dtype)
    parts = [Part("embeddings", embed, teachers.sources(embed, prefix))]
    for number in range(config.num_hidden_layers):
        layer = teachers.on_meta(_Layer, config, number == config.num_hidden_layers - 1, dtype=dtype)
        sources = teachers.sources(layer.layer, f"{prefix}encoder.layer.{number}.")
        parts.append(Part(f"layer {number}", layer, {f"layer.{name}": stored for name, stored in sources.items()}))
    return parts


def load(path: Path, dtype: torch.dtype) -> Bert:
    """The encoder and its tokenizer.json from a snapshot.

    Raises:
        TrainerError: the snapshot is incomplete.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises no other class
        raise TrainerError(f"{path / 'tokenizer.json'} cannot be loaded ({error}); get the teacher again") from error
    # The file may ask for a length of its own and for padding up to it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = teachers.read_config(BertConfig, path)
    teachers.check_vocabulary(path, tokenizer.get_vocab_size(), config.vocab_size)
    return Bert(config, Weights(path), tokenizer, dtype)
