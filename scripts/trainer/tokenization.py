"""The student's tokenizer: from its folder, or from the keys of its GGUF."""

import json
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from trainer.errors import TrainerError
from trainer.gguf_files import open_gguf
from trainer.packs.base import BARE, Template

# Qwen's `<|endoftext|>`: what the engine makes of an empty prompt.
QWEN_PAD = 151643

# How text is cut before the merges, by the name in `tokenizer.ggml.pre`: each pattern splits the pieces of the one
# before. They are the patterns of the models' own tokenizers; "default" is llama.cpp's for files that name none.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


class StudentTokenizer:
    """Prompts to ids, without special tokens around them.

    pad_id: the one token of an empty prompt.
    size: one more than the largest id it can give.
    """

    def __init__(self, backend: Tokenizer, pad_id: int) -> None:
        # A folder's tokenizer.json may ask for both.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.pad_id = pad_id
        self.size: int = 1 + max(pad_id, *backend.get_vocab().values())

    def encode(self, prompts: list[str], template: Template = BARE) -> list[list[int]]:
        """Ids of each prompt in its template, at least one; special tokens that a prompt spells out are matched."""
        texts = [template.around(prompt) for prompt in prompts]
        pieces = [piece for text in texts for piece in text]
        encodings = iter(self.backend.encode_batch_fast(pieces, add_special_tokens=False))
        return [[id for _ in text for id in next(encodings).ids] or [self.pad_id] for text in texts]


def student_tokenizer(gguf: Path | str, folder: Path | str | None) -> StudentTokenizer:
    """The tokenizer of a student.

    Args:
        gguf: the student.
        folder: the folder of its tokenizer; None takes the one in the GGUF.

    Raises:
        TrainerError: there is none, or none that can be read.
    """
    padding = open_gguf(gguf).fields.get("tokenizer.ggml.padding_token_id")
    pad_id = int(padding.contents()) if padding else QWEN_PAD
    if folder is None:
        return StudentTokenizer(_from_keys(gguf), pad_id)
    backend, folder_pad_id = _from_folder(Path(folder))
    return StudentTokenizer(backend, pad_id if folder_pad_id is None else folder_pad_id)


def _from_folder(folder: Path) -> tuple[Tokenizer, int | None]:
    """A folder's tokenizer and the id of its pad token."""
    try:
        # Not by transformers, which builds anew what it thinks the class in tokenizer_config.json is: SmolLM2's would
        # no longer cut numbers into digits.
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            pad = _pad_token(folder / "tokenizer_config.json")
            return tokenizer, tokenizer.token_to_id(pad) if pad else None
        # Without a vocabulary transformers makes one up.
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            return made.backend_tokenizer, made.pad_token_id
        reason = "its files are missing"
    except Exception as error:  # the libraries raise many classes for a damaged file, one of them Exception itself
        reason = str(error).strip().partition("\n")[0]
    raise TrainerError(
        f"the tokenizer in {folder} cannot be loaded ({reason}): it takes tokenizer.json, or vocab.json and "
        "merges.txt, beside tokenizer_config.json; get it again"
    )


def _pad_token(config: Path) -> str | None:
    if not config.is_file():
        return None
    pad = json.loads(config.read_text(encoding="utf-8")).get("pad_token")
    return pad["content"] if isinstance(pad, dict) else pad


def _from_keys(gguf: Path | str) -> Tokenizer:
    """The byte-level BPE that `tokenizer.ggml.*` describes, which llama.cpp would build too."""
    fields = open_gguf(gguf).fields

    def key(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return field.contents() if field else default

    model, tokens, merges = key("model"), key("tokens"), key("merges")
    if not (model and tokens and merges):
        raise TrainerError(f"{gguf} holds no tokenizer; set materials.paths.tokenizer to the folder of the student's")
    if model != "gpt2":
        raise TrainerError(
            f"the tokenizer in {gguf} is of the model {model!r}, and only gpt2 (byte-level BPE) can be read from a "
            "GGUF; set materials.paths.tokenizer to a folder with its tokenizer.json"
        )
    pre = key("pre", "default")
    if pre not in _SPLITS:
        raise TrainerError(
            f"the tokenizer in {gguf} cuts text in the way {pre!r}, and known are {', '.join(_SPLITS)}; set "
            "materials.paths.tokenizer to a folder with its tokenizer.json"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        # Llama 3 takes a word that is a token whole, merges or not.
        bpe = models.BPE(
            vocab=vocabulary,
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:  # the library raises no other class
        raise TrainerError(
            f"the tokenizer in {gguf} is damaged ({error}); set materials.paths.tokenizer to the folder of the "
            "student's"
        ) from error
    tokenizer = Tokenizer(bpe)
    # No unicode normaliser: neither llama.cpp nor the engine has one.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    types = key("token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    return tokenizer
