"""Samples become the tokens that the engine makes of them: pieces, rows of pictures, where learning starts."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from tokenizers import Tokenizer
from trainer.chat_templates import MAGEFLOW, QWEN_IMAGE, Chat, Slots
from trainer.errors import TrainerError

PAD = 151655


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    folder = tiny_models.qwen2_tokenizer(tmp_path_factory.mktemp("qwen2"), merges=None)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def words(tokenizer, ids):
    """The text of ids, a run of picture tokens as one."""
    kept = [token for n, token in enumerate(ids) if token != PAD or n == 0 or ids[n - 1] != PAD]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_mageflow_makes_34_and_64_rows_of_its_heads(tokenizer):
    chat = Chat(MAGEFLOW, tokenizer, "here")
    plain, edit = chat.prompts(["a red fox", "make it blue"], [[], [(2, 3), (4, 1)]])
    assert (plain.start, plain.pictures) == (34, ())
    assert tokenizer.decode(plain.ids[:34], skip_special_tokens=False).endswith("<|im_start|>user\n")
    assert words(tokenizer, plain.ids[34:]) == "a red fox<|im_end|>\n<|im_start|>assistant\n"
    assert (edit.start, edit.pictures) == (64, (Slots(70, 2, 3), Slots(70 + 6 + 7, 4, 1)))
    assert words(tokenizer, edit.ids[64:]) == (
        "Image 1: <|vision_start|><|image_pad|><|vision_end|>Image 2: <|vision_start|><|image_pad|><|vision_end|>"
        "make it blue<|im_end|>\n<|im_start|>assistant\n"
    )
    assert edit.under_pictures.tolist() == [*range(70, 76), *range(83, 87)]
    assert [n for n, token in enumerate(edit.ids) if token == PAD] == edit.under_pictures.tolist()
    assert chat.supervised(edit).all()
    assert len(chat.supervised(edit)) == len(edit.ids)


def test_mageflow_has_nothing_for_an_empty_text(tokenizer):
    (prompt,) = Chat(MAGEFLOW, tokenizer, "here").prompts([""], [[]])
    assert words(tokenizer, prompt.ids[34:]) == "<|im_end|>\n<|im_start|>assistant\n"


def test_qwen_image_drops_the_system_turn_and_learns_no_row_of_a_picture(tokenizer):
    chat = Chat(QWEN_IMAGE, tokenizer, "here")
    plain, edit = chat.prompts(["", "make it blue"], [[], [(12, 12), (2, 2)]])
    assert plain.start == edit.start == 14
    assert words(tokenizer, plain.ids[14:]) == "<|im_start|>user\n <|im_end|>\n<|im_start|>assistant\n"
    assert words(tokenizer, edit.ids[14:]) == (
        "<|im_start|>user\n<image1><|vision_start|><|image_pad|><|vision_end|> <image2><|vision_start|><|image_pad|>"
        "<|vision_end|>make it blue<|im_end|>\n<|im_start|>assistant\n"
    )
    assert edit.pictures == (Slots(22, 12, 12), Slots(22 + 144 + 1 + 5, 2, 2))
    learned = chat.supervised(edit)
    assert not learned[:14].any()
    expected = [n for n in range(14, len(edit.ids)) if edit.ids[n] != PAD]
    assert np.flatnonzero(learned).tolist() == expected


def test_pieces_are_encoded_apart(tokenizer):
    """A prompt that starts with a line break would make one token with the one before it."""
    (prompt,) = Chat(MAGEFLOW, tokenizer, "here").prompts(["\nfox"], [[]])
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    assert prompt.ids[33:35] == encode("\n") * 2
    assert encode("user\n\nfox") != encode("user\n") + encode("\nfox")


def test_a_prompt_that_spells_out_the_picture_token_moves_no_picture(tokenizer):
    (prompt,) = Chat(QWEN_IMAGE, tokenizer, "here").prompts(["<|image_pad|> fox"], [[(1, 2)]])
    assert prompt.under_pictures.tolist() == [22, 23]


def test_another_tokenizer_is_refused(tokenizer, tmp_path: Path):
    folder = tiny_models.qwen2_tokenizer(tmp_path, merges=2000)
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(
        TrainerError, match=r"in .* makes \d+ tokens of '<\|im_start\|>system.*' where the engine has 34"
    ):
        Chat(MAGEFLOW, other, folder)
    swapped = Tokenizer.from_str(tokenizer.to_str().replace("image_pad", "x").replace("vision_pad", "image_pad"))
    with pytest.raises(TrainerError, match=r"has <\|image_pad\|> as id 151654 where the engine has 151655"):
        Chat(QWEN_IMAGE, swapped, folder)
