"""BERT encoders, such as all-MiniLM-L6-v2."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertModel

from trainer.errors import TrainerError
from trainer.teachers import snapshot

EMBEDDINGS = ("embeddings.word_embeddings.weight",)


class Bert:
    """Rows are the last hidden state; a prompt is `[CLS]` ... `[SEP]`."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
        self.vocabulary: int = model.config.vocab_size
        self.dim: int = model.config.hidden_size

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt, cut to `queries` (2 or more) with the end marker last."""
        encodings = self.tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        return [[self.start, *encoding.ids[: queries - 2], self.end] for encoding in encodings]

    @torch.no_grad()
    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Rows [B, P, dim] of ids [B, P]; padding is masked as a key."""
        ids = ids.to(self.model.device)
        return self.model(input_ids=ids, attention_mask=snapshot.mask(ids, lengths)).last_hidden_state

    def embeddings(self) -> Tensor:
        """The word embeddings."""
        return self.model.get_input_embeddings().weight.detach().float().cpu()


def load(path: Path, dtype: torch.dtype, device: torch.device | str) -> Bert:
    """Load the encoder and its tokenizer.json from a snapshot.

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
    model = snapshot.model(BertModel, path, dtype, device, add_pooling_layer=False)
    snapshot.check_vocabulary(path, tokenizer.get_vocab_size(), model.config.vocab_size)
    return Bert(model, tokenizer)
