import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from trainer import corpus, corpus_files, near_duplicates, probe
from trainer.config import Corpus
from trainer.errors import TrainerError
from trainer.files import write_json
from trainer.packs.base import AdapterPack

SPLITS = AdapterPack.splits
OUTPUTS = (*SPLITS, "summary")
WORDS = ["fox", "owl", "teapot", "river", "castle", "moon", "lamp", "violin"]
WORDS += ["rain", "desert", "ship", "garden", "robot", "glass", "winter"]

# Few words, so that near duplicates abound, near duplicates of near duplicates, and prompts that differ in case.
TEXTS = st.lists(
    st.lists(st.sampled_from([*WORDS[:5], "Fox"]), min_size=2, max_size=9).map(" ".join), min_size=60, max_size=120
)
# A failing list of a hundred texts takes minutes to shrink and says no more than the assertion.
quick = settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def build(options: Corpus, records: list[Path], outputs: dict[str, Path]) -> None:
    corpus.build(options, records, {split: outputs[split] for split in SPLITS}, outputs["summary"])


class Built:
    """A corpus built from files of the given texts."""

    def __init__(self, folder: Path, *files: list[str], **changes) -> None:
        paths = []
        for number, texts in enumerate(files):
            paths.append(folder / f"{number}.txt")
            paths[-1].write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        chosen = {"n_train": 1000, "n_val": 500, "val_fraction": 0.4, "near_duplicates": 0.5, "min_chars": 1} | changes
        self.folder = folder
        self.settings = Corpus(presets=[], files=list(map(str, paths)), **chosen)
        self.outputs = {name: folder / name for name in OUTPUTS}
        build(self.settings, [], self.outputs)
        self.summary = json.loads(self.outputs["summary"].read_text(encoding="utf-8"))

    def rows(self, split: str) -> list[dict]:
        return [json.loads(line) for line in self.outputs[split].read_text(encoding="utf-8").splitlines()]

    def texts(self, split: str) -> set[str]:
        return {row["text"] for row in self.rows(split) if row["text"]}

    def bytes(self) -> list[bytes]:
        return [path.read_bytes() for path in self.outputs.values()]


@pytest.fixture
def tiny_val_allowed(monkeypatch):
    monkeypatch.setattr(corpus, "MIN_VAL", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("corpus")


def many(count: int) -> list[str]:
    """Prompts of which no two are near duplicates at the default threshold."""
    return [f"{WORDS[n % 15]} number{n} and {WORDS[n * 7 % 15]} colour{n * 3} in place{n * 5}" for n in range(count)]


@pytest.mark.usefixtures("tiny_val_allowed")
@quick
@given(texts=TEXTS, data=st.data())
def test_the_order_of_files_and_lines_changes_nothing(folders, texts, data):
    try:
        one = Built(folders(), texts)
    except TrainerError:  # by chance, no prompt is left in one of the splits
        reject()
    shuffled = data.draw(st.permutations(texts))
    cut = data.draw(st.integers(1, len(texts) - 1))
    other = Built(folders(), shuffled[:cut], shuffled[cut:])
    for split in ("train", "val"):
        assert [(row["id"], row["text"]) for row in one.rows(split)] == [
            (row["id"], row["text"]) for row in other.rows(split)
        ]
    assert one.summary["dropped"] == other.summary["dropped"]


@pytest.mark.usefixtures("tiny_val_allowed")
@quick
@given(texts=TEXTS, more=TEXTS, n_val=st.sampled_from([5, 500]), n_train=st.sampled_from([5, 500]))
def test_what_was_once_val_never_comes_to_train_when_the_corpus_grows(folders, texts, more, n_val, n_train):
    limits = {"n_val": n_val, "n_train": n_train}
    try:
        small = Built(folders(), texts, **limits)
        large = Built(folders(), texts, more, **limits)
    except TrainerError:
        reject()
    assert not small.texts("val") & large.texts("train")
    assert not large.texts("val") & small.texts("train")
    # Nor does a near duplicate of it.
    for held_out in small.texts("val"):
        assert all(near_duplicates.similarity(held_out, text) < 0.5 for text in large.texts("train"))


@pytest.mark.usefixtures("tiny_val_allowed")
@quick
@given(texts=TEXTS, threshold=st.sampled_from([0.3, 0.5, 0.55, 0.8, 0.95]))
def test_no_two_prompts_of_the_corpus_are_near_duplicates(folders, texts, threshold):
    try:
        built = Built(folders(), texts, near_duplicates=threshold)
    except TrainerError:
        reject()
    prompts = sorted(built.texts("train") | built.texts("val"))
    for number, one in enumerate(prompts):
        for other in prompts[:number]:
            assert near_duplicates.similarity(one, other) < threshold


@pytest.mark.usefixtures("tiny_val_allowed")
@quick
@given(
    texts=st.lists(st.text(max_size=40), min_size=60, max_size=120),
    limits=st.tuples(st.integers(1, 40), st.integers(1, 20)),
)
def test_every_prompt_that_was_read_is_kept_or_counted_as_dropped(folders, texts, limits):
    try:
        built = Built(folders(), many(40) + texts, n_train=limits[0], n_val=limits[1], min_chars=3, max_chars=60)
    except TrainerError:
        reject()
    summary = built.summary
    read = sum(source["read"] for source in summary["sources"].values())
    prompts = summary["train"]["prompts"] + summary["val"]["prompts"]
    assert read == prompts + sum(summary["dropped"].values())
    for split in ("train", "val"):
        assert len(built.rows(split)) == summary[split]["prompts"] + summary[split]["empty"]
        assert sum(source[split] for source in summary["sources"].values()) == summary[split]["prompts"]
        assert sum(summary["length_histogram"][split]) == summary[split]["prompts"]


@quick
@given(texts=TEXTS)
def test_the_search_for_near_duplicates_finds_what_comparing_all_pairs_finds(texts):
    held_out, threshold = len(texts) // 4, 0.5
    expected: list[bool] = []
    for number, text in enumerate(texts):
        rivals = (
            other for place, other in enumerate(texts[:number]) if expected[place] or (place < held_out <= number)
        )
        expected.append(all(near_duplicates.similarity(text, other) < threshold for other in rivals))
    assert near_duplicates.kept(texts, held_out, threshold, limit=10**9) == expected
    wanted = sum(expected[held_out:])
    if wanted > 1:
        stopped = near_duplicates.kept(texts, held_out, threshold, limit=wanted - 1)
        assert stopped == expected[: len(stopped)]
        assert sum(stopped[held_out:]) == wanted - 1


def test_the_same_settings_give_the_same_bytes(tmp_path):
    texts = many(400)
    (tmp_path / "a").mkdir()
    first = Built(tmp_path / "a", texts, n_train=150, n_val=40)
    bytes_before = first.bytes()
    again = Built(tmp_path / "a", texts, n_train=150, n_val=40)
    assert again.bytes() == bytes_before
    (tmp_path / "b").mkdir()
    other_seed = Built(tmp_path / "b", texts, n_train=150, n_val=40, seed=9)
    assert other_seed.texts("val") != first.texts("val")
    ids = {row["text"]: row["id"] for row in first.rows("train") + first.rows("val")}
    assert all(ids.get(row["text"], row["id"]) == row["id"] for row in other_seed.rows("val") if row["text"])


def test_rows_are_sorted_by_a_uniform_id_of_the_text(tmp_path):
    built = Built(tmp_path, many(2000), val_fraction=0.1)
    rows = built.rows("train")
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert all(len(row["id"]) == 16 and int(row["id"], 16) >= 0 for row in rows)
    shards = [int(row["id"], 16) % 4 for row in rows]
    assert all(abs(shards.count(shard) - len(rows) / 4) < 0.2 * len(rows) / 4 for shard in range(4))
    # Selection by rank must not leave the ids of val in one part of their range.
    val = [int(row["id"], 16) / 2**64 for row in built.rows("val") if row["text"]]
    assert min(val) < 0.1
    assert max(val) > 0.9


def test_empty_prompts_are_added_to_both_splits(tmp_path):
    built = Built(tmp_path, many(600), empty_fraction=0.05, val_fraction=0.1)
    for split in ("train", "val"):
        counts = built.summary[split]
        empties = [row for row in built.rows(split) if row["text"] == ""]
        assert len(empties) == counts["empty"] == int(0.05 * counts["prompts"])
        assert {row["source"] for row in empties} == {"empty"}
    ids = [row["id"] for split in ("train", "val") for row in built.rows(split)]
    assert len(ids) == len(set(ids))


def test_val_has_an_empty_prompt_unless_none_are_wanted(tmp_path):
    for fraction, expected in ((0.001, 1), (0.0, 0)):
        built = Built(tmp_path, many(200), empty_fraction=fraction)
        assert built.summary["val"]["empty"] == expected
        assert built.summary["train"]["empty"] == 0


def test_equal_prompts_are_one_whatever_their_case_and_spaces(tmp_path):
    texts = many(100)
    built = Built(tmp_path, texts, [f"  {text.upper()}\t " for text in texts])
    assert built.summary["dropped"] == {"exact duplicate": 100}
    assert built.summary["train"]["prompts"] + built.summary["val"]["prompts"] == 100


def test_lengths_are_limited_after_cleaning(tmp_path):
    built = Built(
        tmp_path, [*many(100), "((((((cat))))))", "x" * 121, "(" + "y" * 120 + ")"], min_chars=8, max_chars=120
    )
    assert built.summary["dropped"] == {"too short": 1, "too long": 1}
    assert "y" * 120 in built.texts("train") | built.texts("val")


def test_without_cleaning_prompts_stay_as_they_are(tmp_path):
    built = Built(tmp_path, [*many(100), "a  (very:1.2)\tﬁne [cat] BREAK"], clean="none")
    assert "a (very:1.2) ﬁne [cat] BREAK" in built.texts("train") | built.texts("val")


def test_at_a_threshold_of_1_only_equal_prompts_are_one(tmp_path):
    built = Built(tmp_path, [*many(100), "red fox in rain", "fox red in rain", "red fox, in rain!"], near_duplicates=1)
    assert built.summary["train"]["prompts"] + built.summary["val"]["prompts"] == 103


def test_the_demo_preset_fills_both_splits(tmp_path):
    settings = Corpus(presets=["demo"], n_train=3600, n_val=400, val_fraction=0.1)
    build(settings, [], {name: tmp_path / name for name in OUTPUTS})
    summary = json.loads((tmp_path / "summary").read_text())
    assert summary["train"] == {"prompts": 3600, "empty": 36}
    assert summary["val"] == {"prompts": 400, "empty": 4}
    assert summary["warnings"] == []


def test_a_downloaded_preset_is_read_from_its_material(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": many(100)}), tmp_path / "data.parquet")
    record = {"id": "prompts-gustavosta", "path": str(tmp_path / "data.parquet")}
    write_json(tmp_path / "record.json", record)
    settings = Corpus(presets=["gustavosta"], val_fraction=0.4)
    outputs = {name: tmp_path / name for name in OUTPUTS}
    build(settings, [tmp_path / "record.json"], outputs)
    summary = json.loads(outputs["summary"].read_text())
    assert summary["sources"]["gustavosta"]["read"] == 100

    pq.write_table(pa.table({"words": many(100)}), tmp_path / "data.parquet")
    with pytest.raises(TrainerError, match=r"data\.parquet has no column `prompt`.*found: `words`"):
        build(settings, [tmp_path / "record.json"], outputs)


def test_fewer_prompts_than_wanted_is_a_warning_that_names_the_setting(tmp_path):
    built = Built(tmp_path, many(200), n_train=5000, n_val=20)
    (warning,) = built.summary["warnings"]
    assert "lower corpus.n_train to " in warning


def test_too_few_val_prompts_stop_with_what_to_change(tmp_path):
    with pytest.raises(TrainerError, match=r"only \d+ val prompts.*raise corpus.val_fraction$"):
        Built(tmp_path, many(100), val_fraction=0.05)
    with pytest.raises(TrainerError, match=r"only 3 val prompts.*raise corpus.n_val, which is 3$"):
        Built(tmp_path, many(100), n_val=3)
    assert not (tmp_path / "train").exists()


def test_no_train_prompts_stop_with_what_to_change(tmp_path):
    with pytest.raises(TrainerError, match=r"no train prompts are left of 50 .*too short.*add prompts to corpus"):
        Built(tmp_path, ["cat"] * 50, min_chars=8)


def ready_made(folder: Path, train: list[str], val: list[str]) -> tuple[dict, dict[str, list[dict]]]:
    for name, texts in (("t.txt", train), ("v.txt", val)):
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    settings = Corpus(
        presets=[], train_file=str(folder / "t.txt"), val_file=str(folder / "v.txt"), n_train=50, n_val=20
    )
    outputs = {name: folder / name for name in OUTPUTS}
    build(settings, [], outputs)
    rows = {
        split: [json.loads(line) for line in outputs[split].read_text(encoding="utf-8").splitlines()]
        for split in ("train", "val")
    }
    return json.loads(outputs["summary"].read_text()), rows


def test_ready_made_splits_are_used_as_they_are(tmp_path):
    texts = many(70)
    special = ["(a:1.2)   [b] BREAK", "x", "y" * 3000]
    summary, rows = ready_made(tmp_path, texts[:47] + special, texts[50:70])
    assert {row["text"] for row in rows["train"]} == {*texts[:47], "(a:1.2) [b] BREAK", "x", "y" * 3000}
    assert {row["text"] for row in rows["val"]} == set(texts[50:70])
    assert summary["dropped"] == {}
    assert summary["warnings"] == []
    assert summary["train"] == {"prompts": 50, "empty": 0}


def test_ready_made_empty_lines_are_empty_prompts(tmp_path):
    summary, rows = ready_made(tmp_path, [*many(50), "", " "], [*(f"val {n}" for n in range(20)), ""])
    assert (summary["train"]["empty"], summary["val"]["empty"]) == (2, 1)
    assert sum(row["text"] == "" for row in rows["train"]) == 2


def test_ready_made_train_prompts_that_are_in_val_are_left_out_and_counted(tmp_path):
    texts = many(70)
    summary, rows = ready_made(tmp_path, [*texts[:50], texts[50].upper(), texts[0]], texts[50:])
    assert summary["dropped"] == {"also in val": 1, "exact duplicate": 1}
    assert len(rows["train"]) == 50
    assert len(rows["val"]) == 20
    assert "are also in" in summary["warnings"][0]


def test_ready_made_splits_of_another_size_than_set_are_a_warning(tmp_path):
    summary, _ = ready_made(tmp_path, many(80), [f"val {n}" for n in range(20)])
    assert "raise corpus.n_train to 80" in summary["warnings"][0]


def test_unreadable_lines_are_skipped_counted_and_listed(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\n".join(many(150)).encode() + b"\nnot \xff text\nbad \xc3(\n")
    outputs = {name: tmp_path / name for name in OUTPUTS}
    build(Corpus(presets=[], files=[str(path)], val_fraction=0.4), [], outputs)
    summary = json.loads(outputs["summary"].read_text())
    assert summary["skipped"] == [
        {"source": str(path), "line": line, "reason": "not valid UTF-8"} for line in (151, 152)
    ]
    assert summary["dropped"]["unreadable"] == 2
    assert summary["sources"][str(path)]["read"] == 152


def test_at_most_a_hundred_unreadable_lines_are_listed(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\n".join(many(3000)).encode() + b"\n" + b"\xff\n" * 150)
    outputs = {name: tmp_path / name for name in OUTPUTS}
    build(Corpus(presets=[], files=[str(path)], val_fraction=0.4), [], outputs)
    summary = json.loads(outputs["summary"].read_text())
    assert len(summary["skipped"]) == 100
    assert summary["dropped"]["unreadable"] == 150


def test_more_than_5_percent_unreadable_lines_stop_the_stage(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\n".join(many(94)).encode() + b"\n" + b"\xff\n" * 6)
    with pytest.raises(TrainerError, match=r"6 of 100 prompts of .*mine\.txt cannot be read \(the first is line 95"):
        build(Corpus(presets=[], files=[str(path)], val_fraction=0.4), [], {n: tmp_path / n for n in OUTPUTS})


def test_the_probe_prompts_are_there_whatever_the_corpus_and_none_of_them_is_trained_on(tmp_path):
    texts = [text for _, text in probe.prompts()]
    built = Built(tmp_path, [*many(300), *(text.upper() for text in texts[:60])])
    trained = {text.casefold() for text in built.texts("train")}
    rows = built.rows("probe")
    assert 0 < len(trained & {text.casefold() for text in texts}) < 60
    assert {row["text"] for row in rows} == {text for text in texts if text.casefold() not in trained}
    assert [row["id"] for row in rows] == sorted(corpus.prompt_id(row["text"]) for row in rows)
    counts = {kind: sum(row["source"] == kind for row in rows) for kind in probe.KINDS}
    assert built.summary["probe"] == counts
    assert sum(counts.values()) == len(rows)


def test_the_probe_prompts_of_ready_made_splits_are_the_same(tmp_path):
    ready_made(tmp_path, many(50), [f"val {n}" for n in range(20)])
    assert sum(1 for _ in corpus_files.read(tmp_path / "probe")) == len(probe.prompts())
