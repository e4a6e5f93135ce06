"""Corpora with pictures: every picture once, val apart from train by what pictures show, nothing by name or order."""

import dataclasses
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tiny_pictures import encoded, picture, write_coco, write_flickr30k, write_folder
from trainer import config, contact_sheet, corpus, corpus_files, packs, picture_corpus, picture_sources, pictures
from trainer.config import Corpus
from trainer.errors import TrainerError
from trainer.files import write_json
from trainer.packs.base import AdapterPack
from workflow import CHECKOUT

SPLITS = AdapterPack.splits
COUNTS = {"n_image": 400, "n_two": 40, "n_val_image": 100, "val_fraction": 0.4}


class Built:
    """A corpus of folders and presets, built into a folder."""

    def __init__(self, folder: Path, *folders: Path, presets: dict[str, Path] | None = None, **changes) -> None:
        self.folder = folder / "corpus"
        presets = presets or {}
        records = []
        for name, path in presets.items():
            records.append(folder / f"images-{name}.json")
            write_json(records[-1], {"id": f"images-{name}", "path": str(path)})
        chosen = {"presets": [], "image_presets": list(presets), "image_folders": list(map(str, folders))}
        self.settings = Corpus(**chosen | COUNTS | changes)
        self.outputs = {split: self.folder / f"{split}.jsonl" for split in SPLITS}
        summary = folder / "corpus.json"
        picture_corpus.build(self.settings, records, self.outputs, summary, threads=2)
        self.summary = json.loads(summary.read_text(encoding="utf-8"))
        self.told = self.summary["pictures"]

    def samples(self, split: str) -> list[corpus_files.Sample]:
        return list(corpus_files.read(self.outputs[split]))

    def shown(self, split: str) -> set[str]:
        """The pictures of a split."""
        return {name for sample in self.samples(split) for name in sample.images}

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / "images").iterdir() if path.suffix != ".jsonl"}


@pytest.fixture(autouse=True)
def tiny_val_allowed(monkeypatch):
    monkeypatch.setattr(picture_corpus, "MIN_VAL", 1)


# Everything that is read is there, once, with its own captions


def test_forty_pictures_with_the_names_of_others_in_two_folders_stay_forty_with_their_captions(tmp_path):
    first = write_folder(tmp_path / "a", range(1, 21), "{:02d}.png")
    second = tmp_path / "b"
    for number in range(21, 41):
        write_folder(second, range(number, number + 1), f"{number - 20:02d}.png")
    built = Built(tmp_path, first, second, n_image=4000)
    assert built.told["kept"] == len(built.files()) == 40
    assert len(built.shown("train")) + len(built.shown("val")) == 40
    content = {pictures.measure(encoded(picture(number))).digest: number for number in range(1, 41)}
    checked = 0
    for sample in [*built.samples("train"), *built.samples("val")]:
        if len(sample.images) == 1 and re.search(r"\bthing\b", sample.text):
            number = content[sample.images[0].partition(".")[0]]
            said = re.findall(r"\bthing (\d+)", sample.text)
            assert said in ([], [str(number)])
            checked += len(said)
    assert checked > 500
    told = sum(built.summary["sources"][str(folder)]["read"] for folder in (first, second))
    assert told == built.told["read"] == 40


def test_the_files_are_kept_as_they_came_under_what_they_show(tmp_path):
    root = write_folder(tmp_path / "in", range(10))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(picture(77).transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)
    (root / "turned.JPEG").write_bytes(turned)
    built = Built(tmp_path, root)
    assert turned in built.files().values()
    for name, data in built.files().items():
        assert name.partition(".")[0] == pictures.measure(data).digest
    assert pictures.open_rgb(built.folder / "images" / f"{pictures.measure(turned).digest}.jpg").size == (48, 36)


def test_files_of_the_same_content_are_one_picture_with_the_captions_of_all(tmp_path):
    root = write_folder(tmp_path / "in", range(12))
    for number in range(6):
        (root / "sub").mkdir(exist_ok=True)
        (root / f"sub/copy{number}.bmp").write_bytes(encoded(picture(number), "BMP"))
        (root / f"sub/copy{number}.txt").write_text(f"copied {number}\n", encoding="utf-8")
    built = Built(tmp_path, root, n_image=1000)
    assert (built.told["read"], built.told["kept"], len(built.files())) == (18, 12, 12)
    texts = {}
    for sample in built.samples("train"):
        if len(sample.images) == 1:
            texts.setdefault(sample.images[0], set()).add(sample.text)
    both = [name for name, said in texts.items() if any("copied" in text for text in said)]
    assert both
    assert all(any(re.search(r"\bthing \d", text) for text in texts[name]) for name in both)


def test_folders_are_read_to_their_depth_without_hidden_files(tmp_path):
    root = write_folder(tmp_path / "in", range(3), "x/y/{:02d}.png")
    write_folder(root, range(3, 5), ".hidden/{:02d}.png")
    write_folder(root, range(5, 6), "._{:02d}.png")
    (root / "notes.txt").write_text("no captions of anything", encoding="utf-8")
    (root / "a.gif").write_bytes(encoded(picture(9), "GIF"))
    for suffix, kind in ((".JPG", "JPEG"), (".jpeg", "JPEG"), (".webp", "WEBP"), (".bmp", "BMP")):
        (root / f"a{suffix}").write_bytes(encoded(picture(len(suffix) * 10), kind))
    source = picture_sources.folder(str(root))
    found = {one.name: one.captions for one in source.pictures}
    named = {"x/y/00.png", "x/y/01.png", "x/y/02.png", "a.JPG", "a.jpeg", "a.webp", "a.bmp"}
    assert set(found) == named
    assert source.count == len(named)
    assert found["x/y/02.png"] == ("thing 2 on a table", "the thing 2")
    assert found["a.bmp"] == ()


def test_names_that_are_no_text_are_read_and_listed(tmp_path):
    root = write_folder(tmp_path / "in", range(20))
    odd = os.fsencode(root) + b"/na\xefve.png"
    try:
        Path(os.fsdecode(odd)).write_bytes(b"broken")
    except OSError:
        pytest.skip("this file system takes only names that are text")
    assert picture_sources.folder_digest(str(root))
    assert [row["name"] for row in Built(tmp_path, root).told["skipped"]] == ["na\\xefve.png"]


def test_flickr30k_is_read_from_its_zip_and_table(tmp_path):
    root = write_flickr30k(tmp_path / "flickr", range(20), lost=(7,))
    names = [one.name for one in picture_sources.preset("flickr30k", root).pictures if not one.problem]
    assert names == [f"{number}.jpg" for number in range(19, -1, -1) if number != 7]  # as they lie in the zip
    built = Built(tmp_path, presets={"flickr30k": root}, n_image=600)
    assert (built.told["read"], built.told["kept"], built.told["unreadable"]) == (20, 19, 1)
    assert built.told["skipped"][0]["name"] == "7.jpg"
    texts = {sample.text for sample in built.samples("train")}
    assert any(text.endswith(" runs.") and " , " not in text for text in texts)  # tidied
    assert {sample.source for sample in built.samples("val")} == {"flickr30k"}


def test_coco_is_read_in_one_pass_over_its_row_groups(tmp_path, monkeypatch):
    from pyarrow import parquet

    root = write_coco(tmp_path / "coco", range(20), files=2, group=3)
    passes, wanted = [], parquet.ParquetFile.iter_batches

    def counted(self, *args, **options):
        passes.append(self.num_row_groups)
        return wanted(self, *args, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    monkeypatch.delattr(parquet.ParquetFile, "read_row_group")
    monkeypatch.delattr(parquet.ParquetFile, "read")
    source = picture_sources.preset("coco_captions", root)
    found = list(source.pictures)
    assert passes == [4, 4]
    assert source.count == 20
    for number, one in enumerate(found):
        assert one.name == f"COCO_{number}.jpg"
        assert one.data == encoded(picture(number), "JPEG", quality=95)
        assert one.captions == (f"coco {number} one", f"coco {number} two")


def test_damaged_downloads_are_one_sentence(tmp_path):
    root = write_coco(tmp_path / "coco", range(6))
    last = root / "data" / "train-00001-of-00002.parquet"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(TrainerError, match=r"train-00001-of-00002.parquet cannot be read"):
        picture_sources.preset("coco_captions", root)
    root = write_flickr30k(tmp_path / "flickr", range(3))
    (root / "flickr30k-images.zip").write_bytes(b"PK")
    with pytest.raises(TrainerError, match=r"flickr30k-images.zip cannot be read"):
        picture_sources.preset("flickr30k", root)


# Broken pictures


def broken(root: Path, numbers: range) -> Path:
    for number in numbers:
        path = root / f"{number:02d}.png"
        path.write_bytes(path.read_bytes()[:-200] if number % 2 else b"")
    return root


def test_a_few_broken_files_are_left_out_counted_and_listed(tmp_path):
    root = broken(write_folder(tmp_path / "in", range(40)), range(2))
    built = Built(tmp_path, root)
    assert (built.told["read"], built.told["kept"], built.told["unreadable"]) == (40, 38, 2)
    assert [row["name"] for row in built.told["skipped"]] == ["00.png", "01.png"]
    assert "truncated" in built.told["skipped"][1]["reason"]
    assert any("2 of 40 pictures" in warning for warning in built.summary["warnings"])


def test_mostly_broken_files_stop_the_run(tmp_path):
    root = broken(write_folder(tmp_path / "in", range(40)), range(24))
    with pytest.raises(TrainerError, match=r"24 of 40 pictures of .*/in cannot be read .*max_bad_pictures \(30%\)"):
        Built(tmp_path, root)
    assert not (tmp_path / "corpus" / "train.jsonl").exists()
    assert Built(tmp_path, root, max_bad_pictures=0.6).told["kept"] == 16


# Splits


def burst(number: int) -> list[bytes]:
    """Copies of one picture that are not the same to the byte nor to the pixel."""
    image = picture(number, (96, 72))
    return [
        encoded(image),
        encoded(image.resize((64, 48), Image.Resampling.BOX)),
        encoded(image, "JPEG", quality=60),
        encoded(image.rotate(0), "WEBP", quality=70),
    ]


def test_copies_that_are_nearly_the_same_are_all_for_training_or_all_for_validation(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    owner = {}
    for number in range(30):
        for index, data in enumerate(burst(number)):
            (root / f"{index}-{number}.{'png' if index < 2 else 'jpg'}").write_bytes(data)
            owner[pictures.measure(data).digest] = number
    built = Built(tmp_path, root, n_val_image=1000, n_image=1000, val_fraction=0.1)
    shown = {split: {owner[name.partition(".")[0]] for name in built.shown(split)} for split in ("train", "val")}
    assert not shown["train"] & shown["val"]
    assert len(shown["train"]) + len(shown["val"]) == 30
    assert built.told["kept"] == 120


def test_names_folders_and_their_order_change_nothing(tmp_path):
    one = Built(tmp_path / "1", write_folder(tmp_path / "x", range(30)), n_text=0)
    other = tmp_path / "y"
    write_folder(other / "q", range(15, 30), "z{:02d}.png")
    write_folder(other / "p", range(15), "{:03d}/k.png")
    two = Built(tmp_path / "2", other / "q", other / "p")
    for split in ("train", "val"):
        rows = [[(s.id, s.text, s.images) for s in built.samples(split)] for built in (one, two)]
        assert rows[0] == rows[1]


def test_a_large_group_is_held_out_no_more_often_than_a_single_picture(tmp_path):
    for clip in range(12):
        image = np.asarray(picture(clip)).astype(int)
        root = tmp_path / str(clip)
        root.mkdir()
        for frame in range(20):
            shown = Image.fromarray((image * 0.9 + frame % 3).astype(np.uint8))
            shown.putpixel((0, 0), (frame, 0, 0))
            (root / f"{frame}.png").write_bytes(encoded(shown))
    built = Built(tmp_path, *(tmp_path / str(clip) for clip in range(12)), n_image=1000, n_val_image=1000)
    sides = built.told["train"], built.told["val"]
    assert sum(sides) == 240
    assert all(side % 20 == 0 for side in sides)
    assert sides[0] >= 80  # of twelve groups of twenty, two in five are held out


def test_added_pictures_never_bring_val_to_train_and_leave_most_samples_as_they_were(tmp_path):
    counts = {"n_image": 60, "n_two": 20, "val_fraction": 0.2}
    root = write_folder(tmp_path / "in", range(60))
    before = Built(tmp_path, root, **counts)
    samples, held_out = {s.id for s in before.samples("train")}, before.shown("val")
    write_folder(root, range(60, 75))
    after = Built(tmp_path, root, **counts)
    assert not held_out & after.shown("train")
    assert held_out <= after.shown("val")
    assert len(samples & {s.id for s in after.samples("train")}) > 0.6 * len(samples)


def test_ids_are_uniform_and_say_text_and_pictures(tmp_path):
    built = Built(tmp_path, write_folder(tmp_path / "in", range(40)))
    samples = [*built.samples("train"), *built.samples("val")]
    assert len({sample.id for sample in samples}) == len(samples)
    assert all(len(sample.id) == 16 and int(sample.id, 16) >= 0 for sample in samples)
    assert [sample.id for sample in built.samples("train")] == sorted(s.id for s in built.samples("train"))
    halves = np.bincount([sample.shard(2) for sample in samples])
    assert abs(halves[0] - halves[1]) < 0.25 * len(samples)
    for sample in samples:
        assert sample.id == picture_corpus.sample_id(sample.text, [name.partition(".")[0] for name in sample.images])


# Counts


def test_the_samples_are_as_many_as_asked_for_and_val_shows_each_picture_once(tmp_path):
    prompts = tmp_path / "prompts.txt"
    lines = [f"word{n} thing{n * 3} place{n * 7} in colour{n * 11}" for n in range(400)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    root = write_folder(tmp_path / "in", range(40))
    built = Built(
        tmp_path,
        root,
        files=[str(prompts)],
        **{"n_image": 300, "n_two": 50, "n_text": 100, "n_val_image": 8, "n_val_text": 30, "empty_fraction": 0.05},
    )
    kinds = {
        split: [sum(len(sample.images) == number for sample in built.samples(split)) for number in (1, 2, 0)]
        for split in ("train", "val")
    }
    assert kinds == {"train": [300, 50, 105], "val": [8, 0, 31]}
    assert built.told["samples"] == {
        "train": {"one": 300, "two": 50, "text": 100},
        "val": {"one": 8, "two": 0, "text": 30},
    }
    assert sum(built.told["instructions"].values()) == 358
    assert len(built.shown("val")) == 8
    assert not any(sample.images[0] == sample.images[1] for sample in built.samples("train") if len(sample.images) > 1)
    empty = [sample for sample in built.samples("train") if not sample.text]
    assert {bool(sample.images) for sample in empty} == {True, False}


def test_the_prompts_without_pictures_are_those_of_a_corpus_without_pictures(tmp_path):
    root = write_folder(tmp_path / "in", range(40))
    with_pictures = Built(tmp_path, root, presets={}, files=[], n_text=0)
    assert not [s for s in with_pictures.samples("train") if not s.images]
    settings = Corpus(presets=["demo"], n_train=80, n_val=20, val_fraction=0.2)
    outputs = {name: tmp_path / name for name in SPLITS}
    corpus.build(settings, [], outputs, tmp_path / "summary")
    folder = tmp_path / "corpus"
    paths = {split: folder / f"{split}.jsonl" for split in SPLITS}
    mixed = Corpus(
        presets=["demo"], image_folders=[str(root)], **COUNTS | {"val_fraction": 0.2, "n_text": 80, "n_val_text": 20}
    )
    picture_corpus.build(mixed, [], paths, tmp_path / "corpus.json")
    for split in SPLITS:
        without = [sample for sample in corpus_files.read(paths[split]) if not sample.images]
        assert without == list(corpus_files.read(outputs[split]))


def test_too_little_is_a_warning_or_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "in", range(20))
    built = Built(tmp_path, root, n_val_image=100)
    assert any("corpus.n_val_image (100)" in warning for warning in built.summary["warnings"])
    with pytest.raises(TrainerError, match=r"none of the 20 different pictures .* is for val .* corpus.val_fraction"):
        Built(tmp_path, root, val_fraction=1e-9)
    monkeypatch.setattr(picture_corpus, "MIN_VAL", 30)
    with pytest.raises(TrainerError, match="a validation needs 30"):
        Built(tmp_path, root)
    with pytest.raises(TrainerError, match=r"the image folder .* does not exist"):
        Built(tmp_path, tmp_path / "none")
    (tmp_path / "void").mkdir()
    with pytest.raises(TrainerError, match=r"holds no \.jpg, "):
        Built(tmp_path, tmp_path / "void")


def test_a_folder_among_the_pictures_stays(tmp_path):
    (tmp_path / "corpus" / "images" / "@eaDir").mkdir(parents=True)
    Built(tmp_path, write_folder(tmp_path / "in", range(30)))
    assert (tmp_path / "corpus" / "images" / "@eaDir").is_dir()


def test_half_a_character_in_a_caption_is_replaced(tmp_path):
    root = write_flickr30k(tmp_path / "in", range(30))
    table = root / "flickr_annotations_30k.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("A boy", "A \\ud83d boy"), encoding="utf-8")
    built = Built(tmp_path, presets={"flickr30k": root}, clean="none")
    assert built.told["without captions"] == 0


def test_a_caption_of_no_letter_is_none(tmp_path):
    root = write_folder(tmp_path / "in", range(30), captions=False)
    for number in range(30):
        (root / f"{number:02d}.txt").write_text("...\n( )\n", encoding="utf-8")
    built = Built(tmp_path, root)
    assert built.told["without captions"] == 30
    assert not [sample.text for sample in built.samples("train") if sample.text[:1] in (".", ",")]


def test_pictures_without_captions_still_make_instructions(tmp_path):
    built = Built(tmp_path, write_folder(tmp_path / "in", range(30), captions=False))
    assert built.told["without captions"] == 30
    assert built.told["samples"]["train"]["one"] == 400
    assert any("main subject" in sample.text for sample in built.samples("train"))


# Resume


def test_a_picture_is_decoded_once_however_often_the_corpus_is_built(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "in", range(20))
    (root / "same.bmp").write_bytes(encoded(picture(3), "BMP"))
    first = Built(tmp_path, root)
    rows = first.samples("train")
    decoded, measure = [], pictures.measure

    def counted(data: bytes) -> pictures.Measured:
        decoded.append(data)
        return measure(data)

    monkeypatch.setattr(pictures, "measure", counted)
    shutil.move(root / "03.png", root / "moved.png")
    shutil.move(root / "03.txt", root / "moved.txt")
    again = Built(tmp_path, root)
    assert decoded == []
    assert again.samples("train") == rows
    # What a crash left behind: half a line; a file that was cut off.
    images = again.folder / "images"
    last = encoded(picture(3), "BMP")
    index = (images / "index.jsonl").read_bytes()
    (images / "index.jsonl").write_bytes(index[:-20])
    assert Built(tmp_path, root).samples("train") == rows
    assert decoded == [last]
    decoded.clear()
    cut = sorted(again.files())[0]
    whole = (images / cut).read_bytes()
    (images / cut).write_bytes(whole[:50])
    assert Built(tmp_path, root).samples("train") == rows
    assert decoded == [whole]
    assert (images / cut).read_bytes() == whole
    decoded.clear()
    assert Built(tmp_path, root).samples("train") == rows
    assert decoded == []


def test_pictures_whose_files_are_gone_leave_the_run_too(tmp_path):
    root = write_folder(tmp_path / "in", range(20))
    assert len(Built(tmp_path, root).files()) == 20
    (root / "05.png").unlink()
    built = Built(tmp_path, root)
    gone = pictures.measure(encoded(picture(5))).digest
    assert len(built.files()) == 19
    assert not any(name.startswith(gone) for name in built.files())


# Settings


@pytest.fixture
def picture_pack(monkeypatch):
    pack = dataclasses.replace(packs.get("demo"), name="album", vision_dim=8)
    monkeypatch.setitem(packs._PACKS, "album", pack)


def album(tmp_path, **changes):
    group = {"presets": [], "image_folders": [str(tmp_path / "in")], "n_image": 3000, "n_two": 100, "n_val_image": 300}
    return {"pack": "album", "runs_dir": str(tmp_path / "runs"), "corpus": group | changes}


@pytest.mark.usefixtures("picture_pack")
def test_the_number_of_shards_counts_samples_with_and_without_pictures(tmp_path):
    sizes = {"shard_size": 100, "block_shards": 2}
    settings = config.load(
        album(tmp_path, presets=["demo"], n_text=1000, n_val_text=150) | {"precompute": sizes | {"teacher": "real"}}
    )
    assert settings.blocks("train") == 21  # 4,100 samples, 200 a block
    assert settings.blocks("val") == 3


@pytest.mark.usefixtures("picture_pack")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_train": 5}, "corpus.n_train"),
        ({"n_val": 5}, "corpus.n_val_image and n_val_text"),
        ({"image_folders": [], "presets": ["demo"]}, "set corpus.image_presets or corpus.image_folders"),
        ({"n_val_image": 0}, "both corpus.n_image and corpus.n_val_image"),
        ({"n_text": 5, "presets": ["demo"]}, "both corpus.n_text and corpus.n_val_text"),
        ({"n_text": 5, "n_val_text": 5}, "corpus.presets and corpus.files"),
        ({"train_file": "a.txt", "val_file": "b.txt"}, "corpus.train_file"),
        ({"image_presets": ["flikr"]}, "flickr30k"),
    ],
)
def test_settings_of_a_pack_with_pictures_that_do_not_fit_are_one_sentence(tmp_path, changes, said):
    with pytest.raises(TrainerError) as error:
        config.load(album(tmp_path, **changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("corpus", "image_presets", ["flickr30k"]),
        ("corpus", "image_folders", ["x"]),
        ("corpus", "n_image", 3),
        ("corpus", "max_bad_pictures", 0.5),
        ("precompute", "reference_areas", [[147456, 1.0]]),
    ],
)
def test_packs_without_pictures_refuse_settings_of_pictures(group, key, value):
    with pytest.raises(TrainerError, match=f"the pack demo takes no pictures; leave the setting `{group}.{key}` out"):
        config.load({"pack": "demo", group: {key: value}})


def test_settings_files_of_packs_without_pictures_say_nothing_of_pictures(tmp_path):
    settings = config.load({"pack": "demo", "runs_dir": str(tmp_path)})
    config.write_stage_settings(settings)
    for stage in ("corpus", "precompute"):
        written = json.loads((tmp_path / "demo" / "settings" / f"{stage}.json").read_text(encoding="utf-8"))
        assert not [key for key in written if "image" in key or "picture" in key or key in ("n_two", "n_text")]


@pytest.mark.usefixtures("picture_pack")
def test_a_changed_folder_changes_the_settings_of_the_corpus_and_no_other(tmp_path):
    root = write_folder(tmp_path / "in", range(3))
    settings = config.load(album(tmp_path))
    folder = Path(settings.folder) / "settings"

    def texts():
        config.write_stage_settings(settings)
        return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}

    seen = [texts()]
    assert texts() == seen[0]
    for change in (
        lambda: write_folder(root, range(3, 4), "deep/{:02d}.png"),
        lambda: (root / "00.txt").write_text("another caption", encoding="utf-8"),
        lambda: (root / "00.txt").write_text("another CAPTION", encoding="utf-8"),
        lambda: (root / "01.png").write_bytes(encoded(picture(30))),
        lambda: (root / "02.png").unlink(),
    ):
        change()
        seen.append(texts())
        assert {name for name in seen[-1] if seen[-1][name] != seen[-2][name]} == {"corpus.json"}
    (root / "other.log").write_text("not read", encoding="utf-8")
    assert texts() == seen[-1]


@pytest.mark.usefixtures("picture_pack")
def test_pictures_that_come_while_the_corpus_is_built_are_noticed_the_next_time(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "in", range(30))
    settings = config.load(album(tmp_path))
    run = Path(settings.folder)
    names = {split: run / f"corpus/{split}.jsonl" for split in SPLITS} | {"summary": run / "corpus.json"}
    config.write_stage_settings(settings)
    before = (run / "settings" / "corpus.json").read_text(encoding="utf-8")
    monkeypatch.setattr(picture_corpus, "build", lambda *a, **k: write_folder(root, range(30, 31)))
    given = {"log": [run / "log"], "input": SimpleNamespace(presets=[]), "output": names, "threads": 1}
    job = SimpleNamespace(params=SimpleNamespace(settings=settings.model_dump()), **given)
    runpy.run_path(str(CHECKOUT / "scripts" / "corpus.py"), {"snakemake": job})
    assert (run / "settings" / "corpus.json").read_text(encoding="utf-8") == before
    config.write_stage_settings(settings)
    assert (run / "settings" / "corpus.json").read_text(encoding="utf-8") != before


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "in", range(2), "deep/{:02d}.png")
    scandir = os.scandir

    def refused(path):
        if Path(path) == root / "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(TrainerError, match=r"image folder .*in cannot be read .Permission denied: .*deep"):
        picture_sources.folder_digest(str(root))


# The contact sheet


def test_a_contact_sheet_shows_the_same_samples_each_time_with_one_and_two_pictures(tmp_path):
    built = Built(tmp_path, write_folder(tmp_path / "in", range(40)))
    sheet = contact_sheet.samples(built.folder)
    assert sheet == contact_sheet.samples(built.folder)
    assert [len(sample["images"]) for sample in sheet] == [1] * 20 + [2] * 4
    known = {(sample.text, sample.source) for sample in built.samples("train")}
    assert {(sample["text"], sample["source"]) for sample in sheet} <= known
    assert all(image.startswith("data:image/jpeg;base64,") for sample in sheet for image in sample["images"])


def test_a_contact_sheet_stays_small_whatever_the_pictures(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    noise = np.random.default_rng(0)
    for number in range(30):
        large = noise.integers(0, 256 - 8 * number, (400, 500, 3), dtype=np.uint8)
        (root / f"{number}.jpg").write_bytes(encoded(Image.fromarray(large), "JPEG"))
    sheet = contact_sheet.samples(Built(tmp_path, root).folder)
    assert sum(len(image) for sample in sheet for image in sample["images"]) < 1_000_000


def test_a_corpus_without_pictures_has_no_contact_sheet(tmp_path):
    assert contact_sheet.samples(tmp_path) == []


def test_a_contact_sheet_leaves_samples_with_damaged_pictures_out(tmp_path):
    built = Built(tmp_path, write_folder(tmp_path / "in", range(40)))
    shown = sorted(built.shown("train"))[:5]
    for name in shown:
        (built.folder / "images" / name).write_bytes(b"no picture")
    sheet = contact_sheet.samples(built.folder)
    assert [len(sample["images"]) for sample in sheet] == [1] * 20 + [2] * 4
    assert contact_sheet.thumbnails(built.folder, shown) == []
