"""The student's tokenizer: from a folder or from the GGUF, with the same ids."""

import json
from pathlib import Path

import gguf
import pytest
import tiny_models
from trainer.errors import TrainerError
from trainer.packs import llada_image
from trainer.packs.base import Template
from trainer.tokenization import QWEN_PAD, student_tokenizer
from transformers import AutoTokenizer

PROMPTS = [
    "a red fox in the snow, 35mm, f/1.8",
    "DON'T don't I'll",
    "two  spaces\n\nlines\r\n\ttab ",
    "日本語 Русский 한국어 é 😀",
    "<|im_start|>user\nhi<|im_end|> <|im_",
    " ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen2_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A student that holds its tokenizer."""
    return tiny_models.student_gguf(tmp_path_factory.mktemp("student") / "student.gguf", tokenizer=folder)


@pytest.fixture(scope="module")
def without_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.student_gguf(tmp_path_factory.mktemp("student") / "student.gguf")


def keys_only(path: Path, pre: str | None, tokens: list[str], merges: list[str], model: str = "gpt2") -> Path:
    """A GGUF with nothing but a tokenizer whose last token is special."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(student: Path, folder: Path | None) -> str:
    with pytest.raises(TrainerError) as caught:
        student_tokenizer(student, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_gives_the_ids_of_transformers(without_keys: Path, folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = reference(PROMPTS, add_special_tokens=False)["input_ids"]
    assert student_tokenizer(without_keys, folder).encode(PROMPTS) == expected


def test_keys_give_the_ids_of_the_folder(with_keys: Path, folder: Path) -> None:
    from_keys, from_folder = student_tokenizer(with_keys, None), student_tokenizer(with_keys, folder)
    assert from_keys.encode(PROMPTS) == from_folder.encode(PROMPTS)
    assert from_keys.pad_id == from_folder.pad_id


def test_special_tokens_in_a_prompt_are_matched(with_keys: Path) -> None:
    tokenizer = student_tokenizer(with_keys, None)
    start = tokenizer.backend.token_to_id("<|im_start|>")
    assert tokenizer.encode(["<|im_start|>"]) == [[start]]
    assert start not in tokenizer.encode(["<|im_"])[0]


def test_empty_prompt_is_the_pad_token(with_keys: Path, without_keys: Path, folder: Path) -> None:
    tokenizer = student_tokenizer(without_keys, folder)
    assert tokenizer.pad_id == tokenizer.backend.token_to_id("<|endoftext|>")
    assert tokenizer.encode(["", "a"])[0] == [tokenizer.pad_id]
    assert student_tokenizer(with_keys, None).encode([""]) == [[tokenizer.pad_id]]


def test_pad_token_falls_back_to_the_keys_and_then_to_qwens(
    with_keys: Path, without_keys: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert student_tokenizer(with_keys, tmp_path).pad_id == student_tokenizer(with_keys, None).pad_id
    assert student_tokenizer(without_keys, tmp_path).encode([""]) == [[QWEN_PAD]]
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": {"content": "<|im_end|>"}}')
    tokenizer = student_tokenizer(with_keys, tmp_path)
    assert tokenizer.pad_id == tokenizer.backend.token_to_id("<|im_end|>")


def test_padding_and_truncation_of_the_folder_are_off(without_keys: Path, folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = student_tokenizer(without_keys, tmp_path)
    assert tokenizer.encode(PROMPTS) == student_tokenizer(without_keys, folder).encode(PROMPTS)


def test_splitting_of_the_file_wins_over_the_class_in_the_config(without_keys: Path, tmp_path: Path) -> None:
    tokens = ["1", "2", "12", "Ġ", "<|end|>"]
    student = keys_only(tmp_path / "smollm.gguf", "smollm", tokens, ["1 2"])
    student_tokenizer(student, None).backend.save(str(tmp_path / "tokenizer.json"))
    # transformers would cut text as GPT-2 does here, and take 12 as one token.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert student_tokenizer(without_keys, tmp_path).encode(["12"]) == [[0, 1]]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["1111", "1"]),  # digits are one word
        ("smollm", ["1", "1", "1", "1", "1"]),  # each digit is a word
        ("qwen2", ["1", "1", "1", "1", "1"]),
        ("llama-bpe", ["111", "11"]),  # three digits are, and one that is a token needs no merges
        ("default", ["11", "1", "11"]),  # three digits are
        (None, ["11", "1", "11"]),
    ],
)
def test_text_is_cut_as_the_keys_say(tmp_path: Path, pre: str | None, cut: list[str]) -> None:
    tokens = ["1", "11", "111", "1111", "<|end|>"]
    path = keys_only(tmp_path / "student.gguf", pre, tokens, ["1 1", "11 11"])
    assert [tokens[n] for n in student_tokenizer(path, None).encode(["11111"])[0]] == cut


def test_size_covers_every_id(with_keys: Path, without_keys: Path, folder: Path) -> None:
    assert student_tokenizer(with_keys, None).size == 2560
    tokenizer = student_tokenizer(without_keys, folder)
    assert tokenizer.size == 1 + tokenizer.backend.token_to_id(tiny_models.QWEN2_SPECIALS[-1])


def test_qwen2_has_the_ids_of_the_engine(without_keys: Path, tmp_path: Path) -> None:
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    tokenizer = student_tokenizer(without_keys, tiny_models.qwen2_tokenizer(tmp_path, merges=None))
    assert tokenizer.size == 151674
    ids = tokenizer.encode(["<|endoftext|><|im_start|>user\n<|im_end|><|vision_start|><|image_pad|>", "assistant", ""])
    # contracts/ggk-engine.md 4, and ids known from Qwen2.
    assert ids == [[151643, 151644, 872, 198, 151645, 151652, 151655], [77091], [151643]]


def test_a_prompt_is_read_in_its_template_piece_by_piece(without_keys: Path, folder: Path) -> None:
    tokenizer = student_tokenizer(without_keys, folder)
    template = Template(pieces=("the f", "{prompt}", "\n"), empty=("Nothing",))
    a, prompt, b, nothing = tokenizer.encode(["the f", "ox {prompt}", "\n", "Nothing"])
    assert tokenizer.encode(["ox {prompt}", ""], template) == [a + prompt + b, nothing]
    assert tokenizer.encode(["the fox {prompt}\n"]) != [a + prompt + b]  # whole, " fox" is one token


def test_llada_image_has_the_template_of_the_engine(without_keys: Path, tmp_path: Path) -> None:
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    tokenizer = student_tokenizer(without_keys, tiny_models.qwen2_tokenizer(tmp_path, merges=None))
    empty, fox = tokenizer.encode(["", "a fox"], llada_image.PACK.template)
    text = "<role>HUMAN</role> Generate an image.\n<role>ASSISTANT</role>\n<IMAGE1>"
    assert (len(empty), tokenizer.backend.decode(empty)) == (24, text)  # contracts/ggk-engine.md 4
    assert tokenizer.backend.decode(fox) == text.replace("image.", "image: a fox")
    pieces = "<role>HUMAN</role> Generate an image:", " a fox", "\n<role>ASSISTANT</role>\n<IMAGE1>"
    assert fox == [token for piece in tokenizer.encode(list(pieces)) for token in piece]


def test_student_without_tokenizer_needs_a_folder(without_keys: Path) -> None:
    assert "holds no tokenizer; set materials.paths.tokenizer" in refusal(without_keys, None)


def test_tokenizers_that_cannot_be_read_are_refused(without_keys: Path, tmp_path: Path) -> None:
    tokens = ["1", "11", "<|end|>"]
    unknown = keys_only(tmp_path / "a.gguf", "tekken", tokens, ["1 1"])
    assert "cuts text in the way 'tekken', and known are gpt-2, smollm, qwen2" in refusal(unknown, None)
    other = keys_only(tmp_path / "b.gguf", "qwen2", tokens, ["1 1"], model="llama")
    assert "is of the model 'llama', and only gpt2" in refusal(other, None)
    damaged = keys_only(tmp_path / "c.gguf", "qwen2", tokens, ["1 x"])
    assert "is damaged" in refusal(damaged, None)
    assert "its files are missing" in refusal(without_keys, tmp_path)
    assert "its files are missing" in refusal(without_keys, tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"the tokenizer in {tmp_path} cannot be loaded" in refusal(without_keys, tmp_path)
