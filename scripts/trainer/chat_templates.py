"""Samples of text and pictures as the token ids of the engine's chat templates.

A sample is a prefix, in which the pictures have their places, its text, and a suffix. As in the engine each of the
three is encoded by itself, so that no token spans two of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.errors import TrainerError

_PAD, _PAD_ID = "<|image_pad|>", 151655
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Template:
    """How a model of the engine words a sample.

    heads: of a sample without and of one with pictures, the tokens that the model's DiT does not read.
    head_tokens: how many they are in the engine.
    opening: what follows before the pictures.
    picture: how picture {} is announced.
    between: two pictures.
    empty: what an empty text is replaced by.
    everything: whether all rows teach something, or only those that the DiT reads and that are no picture's.
    """

    heads: tuple[str, str]
    head_tokens: tuple[int, int]
    opening: str
    picture: str
    between: str
    empty: str
    everything: bool


_SYSTEM, _USER = "<|im_start|>system\n", "<|im_start|>user\n"
MAGEFLOW = Template(
    heads=(
        f"{_SYSTEM}Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        f"relationships of the objects and background:<|im_end|>\n{_USER}",
        f"{_SYSTEM}Describe the key features of the input image (color, shape, size, texture, objects, background), "
        "then explain how the user's text instruction should alter or modify the image. Generate a new image that "
        "meets the user's requirements while maintaining consistency with the original input where appropriate."
        f"<|im_end|>\n{_USER}",
    ),
    head_tokens=(34, 64),
    opening="",
    picture="Image {}: ",
    between="",
    empty="",
    everything=True,
)
QWEN_IMAGE = Template(
    heads=(f"{_SYSTEM}Comprehend and analyze the provided prompt.<|im_end|>\n",) * 2,
    head_tokens=(14, 14),
    opening=_USER,
    picture="<image{}>",
    between=" ",
    empty=" ",
    everything=False,
)


@dataclass(frozen=True)
class Slots:
    """The place of a picture in a sequence: `rows` times `columns` tokens from `start` on, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Prompt:
    """A sample as token ids.

    start: the first row that the DiT reads.
    pictures: where each of its pictures is.
    """

    ids: list[int]
    start: int
    pictures: tuple[Slots, ...]

    @property
    def under_pictures(self) -> NDArray[np.int64]:
        """[V] the positions of the pictures' tokens."""
        return np.concatenate([np.arange(0), *(np.arange(slots.start, slots.end) for slots in self.pictures)])


class Chat:
    """A template and the tokenizer it is encoded with."""

    def __init__(self, template: Template, tokenizer: Tokenizer, path: Path | str) -> None:
        """Compare the tokenizer with the engine's.

        Args:
            template: of the engine's model.
            tokenizer: Qwen's; it is told neither to pad nor to truncate.
            path: where the tokenizer is from, for messages.

        Raises:
            TrainerError: it makes something else of the template than the engine does.
        """
        self.template, self.tokenizer = template, tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for head, count in zip(template.heads, template.head_tokens, strict=True):
            if (found := len(self._encode(head))) != count:
                raise TrainerError(
                    f"the tokenizer in {path} makes {found} tokens of {head[:50] + '...'!r} where the engine has "
                    f"{count}: it is not Qwen's; set materials.paths.tokenizer to the one of the student"
                )
        if (found := tokenizer.token_to_id(_PAD)) != _PAD_ID:
            raise TrainerError(
                f"the tokenizer in {path} has {_PAD} as id {found} where the engine has {_PAD_ID}: it is not Qwen's; "
                "set materials.paths.tokenizer to the one of the student"
            )
        self._suffix = self._encode(_SUFFIX)
        self._prefixes: dict[int, list[int]] = {}

    def prompts(self, texts: Sequence[str], pictures: Sequence[Sequence[tuple[int, int]]]) -> list[Prompt]:
        """Encode samples.

        Args:
            texts: of each sample.
            pictures: of each sample, (rows, columns) of tokens that each of its pictures takes: its sides / 32.
        """
        texts = [text or self.template.empty for text in texts]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._prompt(it.ids, grids) for it, grids in zip(encodings, pictures, strict=True)]

    def supervised(self, prompt: Prompt) -> NDArray[np.bool_]:
        """[P] which rows the adapter is to learn."""
        if self.template.everything:
            return np.ones(len(prompt.ids), bool)
        wanted = np.arange(len(prompt.ids)) >= prompt.start
        wanted[prompt.under_pictures] = False
        return wanted

    def _prompt(self, text: list[int], grids: Sequence[tuple[int, int]]) -> Prompt:
        count = len(grids)
        if count not in self._prefixes:
            self._prefixes[count] = self._encode(self._prefix(count))
        waiting, ids, pictures = list(grids), [], []
        for token in self._prefixes[count]:
            if token == _PAD_ID:
                pictures.append(Slots(len(ids), *waiting.pop(0)))
                ids += [token] * (pictures[-1].end - len(ids))
            else:
                ids.append(token)
        return Prompt(ids + text + self._suffix, self.template.head_tokens[count > 0], tuple(pictures))

    def _prefix(self, pictures: int) -> str:
        template = self.template
        places = (f"{template.picture.format(n + 1)}<|vision_start|>{_PAD}<|vision_end|>" for n in range(pictures))
        return template.heads[pictures > 0] + template.opening + template.between.join(places)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
