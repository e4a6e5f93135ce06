"""The encoder of T5 v1.1, such as T5-XXL."""

from pathlib import Path

import torch
from tokenizers import Encoding
from torch import Tensor
from transformers import T5EncoderModel, T5Tokenizer

from trainer.errors import TrainerError
from trainer.teachers import snapshot

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")


class T5:
    """Rows are the encoder's last hidden state.

    A prompt ends with `</s>` (1). What is trained has to be what the engine encodes, which differs from what diffusion
    pipelines do: the empty prompt is "▁" and `</s>` instead of `</s>` alone, and of a run of unknown characters each is
    an `<unk>` instead of all together. Its other differences show only on text that is not plain, which is why the
    corpus is cleaned.
    """

    def __init__(self, model: T5EncoderModel, tokenizer: T5Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.end: int = tokenizer.eos_token_id
        self.unknown: int = tokenizer.unk_token_id
        space = self.tokenizer.token_to_id("▁")
        self.empty: list[int] = [] if space is None else [space]
        self.vocabulary: int = model.config.vocab_size
        self.dim: int = model.config.d_model

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt, cut to `queries` with the end marker last."""
        encodings = self.tokenizer.encode_batch(prompts, add_special_tokens=False)
        ids = [self._ids(encoding) or self.empty for encoding in encodings]
        return [[*row[: queries - 1], self.end] for row in ids]

    def _ids(self, encoding: Encoding) -> list[int]:
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [id for id, (start, end) in spans for _ in range(end - start if id == self.unknown else 1)]

    @torch.no_grad()
    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Rows [B, P, dim] of ids [B, P]; padding is masked as a key."""
        ids = ids.to(self.model.device)
        return self.model(input_ids=ids, attention_mask=snapshot.mask(ids, lengths)).last_hidden_state

    def embeddings(self) -> Tensor:
        """The shared token embeddings."""
        return self.model.get_input_embeddings().weight.detach().float().cpu()


def load(path: Path, dtype: torch.dtype, device: torch.device | str) -> T5:
    """Load the encoder and its tokenizer (spiece.model or tokenizer.json) from a snapshot.

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
    model = snapshot.model(T5EncoderModel, path, dtype, device)
    snapshot.check_vocabulary(path, len(tokenizer), model.config.vocab_size)
    return T5(model, tokenizer)
