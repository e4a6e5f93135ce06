"""The corpus of a LoRA: every picture once with its own caption, by what it shows, and every fault told at once."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_pictures import encoded, picture
from trainer import pictures
from trainer.config import Pictures
from trainer.errors import TrainerError
from trainer.lora import corpus, demo_pictures, geometry
from workflow import CHECKOUT

FILES = ("train", "val", "text", "summary")


def write(root: Path, numbers, name: str = "{:02d}.png", caption: str | None = "thing {}", size=(96, 80)) -> Path:
    """Pictures by number, with a caption each."""
    root.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = root / name.format(number)
        path.write_bytes(encoded(picture(number, size), path.suffix[1:].upper()))
        if caption is not None:
            path.with_suffix(".txt").write_text(caption.format(number), encoding="utf-8")
    return root


class Built:
    """A corpus of a folder, built into another."""

    def __init__(self, target: Path, root: Path, resolution: int = 64, **changes) -> None:
        self.outputs = {name: target / f"corpus/{name}.jsonl" for name in FILES[:3]}
        self.outputs["summary"] = target / "corpus.json"
        corpus.build(Pictures(folder=str(root), **{"min_side": 16} | changes), resolution, self.outputs, threads=2)
        self.told = json.loads(self.outputs["summary"].read_text(encoding="utf-8"))
        self.train, self.val = ({row.id: row for row in corpus.read(self.outputs[split])} for split in FILES[:2])
        self.rows = self.val | self.train
        self.texts = [json.loads(line) for line in self.outputs["text"].read_text(encoding="utf-8").splitlines()]

    def by_file(self) -> dict[str, corpus.Picture]:
        return {row.file: row for row in self.rows.values()}

    def bytes(self) -> dict[str, bytes]:
        return {name: path.read_bytes() for name, path in self.outputs.items()}

    def images(self) -> dict[str, bytes]:
        folder = self.outputs["train"].parent / "images"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".jsonl"}


def fault(target: Path, root: Path, **changes) -> str:
    with pytest.raises(TrainerError) as error:
        Built(target, root, **changes)
    assert not (target / "corpus/train.jsonl").exists()
    return str(error.value)


# Rows


def test_a_row_says_what_the_picture_is_and_the_file_is_kept_as_it_came(tmp_path):
    root = write(tmp_path / "in", range(3))
    built = Built(tmp_path, root, resolution=128)
    data = (root / "01.png").read_bytes()
    digest = pictures.measure(data).digest
    (row,) = (row for row in map(json.loads, built.bytes()["train"].splitlines()) if row["file"] == "01.png")
    assert row == {
        "id": digest[:16],
        "file": "01.png",
        "text": "thing 1",
        "text_id": corpus.text_id("thing 1"),
        "image": f"{digest}.png",
        "width": 96,
        "height": 80,
        "bucket": [128, 128],
        "mask": None,
        "weight": 1.0,
        "source": "pictures",
    }
    assert built.images()[f"{digest}.png"] == data
    assert list(built.train) == sorted(built.train)


def test_captions_are_listed_once_with_the_empty_one(tmp_path):
    root = write(tmp_path / "in", range(4), caption="a dog")
    (root / "03.txt").write_text("ein Hündchen — 犬", encoding="utf-8")
    built = Built(tmp_path, root)
    assert [row["id"] for row in built.texts] == sorted(row["id"] for row in built.texts)
    assert {row["text"]: row["id"] for row in built.texts} == {
        "": "e3b0c44298fc1c14",
        "a dog": corpus.text_id("a dog"),
        "ein Hündchen — 犬": corpus.text_id("ein Hündchen — 犬"),
    }
    assert {row["source"] for row in built.texts} == {"caption"}
    assert built.told["captions"] == {"unique": 2, "empty": 0, "from": {"sidecar": 4}, "longest": 16}


def test_every_picture_has_one_row_and_one_bucket_however_few_share_it(tmp_path):
    root = tmp_path / "in"
    shapes = [(64, 64)] * 20 + [(64, 128), (128, 64), (90, 64), (64, 90), (400, 64), (64, 399)]
    for number, size in enumerate(shapes):
        write(root, [number], size=size)
    built = Built(tmp_path, root, resolution=256)
    assert sorted(row.file for row in built.rows.values()) == sorted(f"{n:02d}.png" for n in range(len(shapes)))
    assert len(built.train) + len(built.val) == len(shapes)
    listed = built.told["buckets"]
    assert sum(row["pictures"] for row in listed) == len(shapes)
    assert sum(row["val"] for row in listed) == len(built.val)
    assert min(row["pictures"] for row in listed) == 1
    for row in built.rows.values():
        assert row.bucket == geometry.bucket(row.size, geometry.buckets(256, 9))
    assert {tuple(row["size"]) for row in listed} == {row.bucket for row in built.rows.values()}
    assert next(warning for warning in built.told["warnings"] if "longer than 2:1" in warning).endswith(
        ": 2 (24.png, 25.png)"
    )
    assert max(row["most_cut_off"] for row in listed) > 0.6
    assert {row["enlarged"] for row in listed if tuple(row["size"]) == (256, 256)} == {20}


def test_of_another_resolution_rows_and_ratios_are_others(tmp_path):
    root = write(tmp_path / "in", range(2), size=(96, 64))
    small, large, square = (
        Built(tmp_path / str(n), root, **changes)
        for n, changes in enumerate([{"resolution": 128}, {"resolution": 256}, {"resolution": 128, "ratios": 1}])
    )
    assert {row.bucket for row in small.rows.values()} == {(192, 128)}
    assert {row.bucket for row in large.rows.values()} == {(320, 192)}
    assert {row.bucket for row in square.rows.values()} == {(128, 128)}
    assert small.rows.keys() == large.rows.keys() == square.rows.keys()
    assert len({built.told["digest"] for built in (small, large, square)}) == 3


# By what is shown, not by names, order or times


def test_a_renamed_picture_changes_no_id_and_no_digest(tmp_path):
    root = write(tmp_path / "in", range(14))
    before = Built(tmp_path / "a", root)
    for suffix in (".png", ".txt"):
        (root / f"03{suffix}").rename(root / f"renamed é{suffix}")
    after = Built(tmp_path / "b", root)
    assert (before.train.keys(), before.val.keys()) == (after.train.keys(), after.val.keys())
    changed = [key for key in before.rows if before.rows[key] != after.rows[key]]
    assert [after.rows[key].file for key in changed] == ["renamed é.png"]
    assert before.told["digest"] == after.told["digest"]
    assert before.bytes()["text"] == after.bytes()["text"]


def test_whatever_the_names_each_picture_keeps_its_caption_and_its_side(tmp_path):
    root = write(tmp_path / "in", range(14))
    before = Built(tmp_path / "a", root, holdout=0.3)
    for seed in range(4):
        names = [f"{number:02d}" for number in range(14)]
        random.Random(seed).shuffle(names)
        other = tmp_path / f"in{seed}"
        other.mkdir()
        lines = []
        for number, name in enumerate(names):
            shutil.copy(root / f"{number:02d}.png", other / f"{name}.png")
            if number % 2:
                shutil.copy(root / f"{number:02d}.txt", other / f"{name}.txt")
            else:
                lines.append(json.dumps({"file_name": f"{name}.png", "text": f"thing {number}"}))
        (other / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
        after = Built(tmp_path / str(seed), other, holdout=0.3)
        assert after.told["digest"] == before.told["digest"]
        assert {key: row.text for key, row in after.val.items()} == {key: row.text for key, row in before.val.items()}
        assert after.train.keys() == before.train.keys()


def test_an_edited_picture_changes_its_own_row_alone_also_if_its_time_and_size_stay(tmp_path):
    root = write(tmp_path / "in", range(14), "{:02d}.bmp")
    before = Built(tmp_path, root)
    path = root / "03.bmp"
    times, data = path.stat(), bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = Built(tmp_path, root)
    (old,) = before.rows.keys() - after.rows.keys()
    (new,) = after.rows.keys() - before.rows.keys()
    assert before.rows[old].file == after.rows[new].file == "03.bmp"
    assert all(after.rows[key] == before.rows[key] for key in before.rows.keys() & after.rows.keys())
    assert before.told["digest"] != after.told["digest"]
    assert sorted(after.images()) == sorted(row.image for row in after.rows.values())  # the old one is gone


def test_two_swapped_captions_change_exactly_two_rows(tmp_path):
    root = write(tmp_path / "in", range(14))
    before = Built(tmp_path / "a", root)
    first, second = root / "04.txt", root / "05.txt"
    first_text, second_text = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_text)
    second.write_bytes(first_text)
    after = Built(tmp_path / "b", root)
    changed = [key for key in before.rows if before.rows[key] != after.rows[key]]
    assert sorted(after.rows[key].file for key in changed) == ["04.png", "05.png"]
    assert before.rows.keys() == after.rows.keys()
    assert before.bytes()["text"] == after.bytes()["text"]
    assert before.told["digest"] != after.told["digest"]


def test_outputs_are_the_same_bytes_whatever_the_order_of_the_folder_and_the_threads(tmp_path, monkeypatch):
    root = write(tmp_path / "in", range(20))
    shutil.copy(root / "03.png", root / "copy.png")
    shutil.copy(root / "03.txt", root / "copy.txt")
    (root / "left.txt").write_text("over", encoding="utf-8")
    expected = Built(tmp_path / "a", root).bytes()
    assert Built(tmp_path / "a", root).bytes() == expected  # with all of it known
    scandir = os.scandir

    class Shuffled(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def shuffled(path):
        entries = list(scandir(path))
        random.Random(1).shuffle(entries)
        return Shuffled(entries)

    monkeypatch.setattr(os, "scandir", shuffled)
    assert Built(tmp_path / "b", root).bytes() == expected


def test_turned_pictures_have_the_size_the_bucket_and_the_pixels_of_their_upright_twins(tmp_path):
    root = tmp_path / "in"
    upright = picture(1, (128, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    root.mkdir()
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)
    (root / "phone.jpg").write_bytes(turned)
    built = Built(tmp_path, root, resolution=128, instance_prompt="x")
    (row,) = built.rows.values()
    assert (row.width, row.height, row.bucket) == (128, 64, (192, 128))
    # Its upright twin: the same pixels in a file without notes.
    shown = pictures.open_rgb(tmp_path / "corpus/images" / row.image)
    assert np.abs(np.asarray(shown).astype(int) - np.asarray(upright)).mean() < 8
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin/upright.png").write_bytes(encoded(shown))
    twin = Built(tmp_path / "other", tmp_path / "twin", resolution=128, instance_prompt="x")
    assert twin.rows.keys() == built.rows.keys()
    placed = geometry.place(row.id, row.size, row.bucket, Pictures(), 0)
    assert placed.time_ids[:2] == (64, 128)


def test_files_that_show_the_same_are_one_row_and_a_warning(tmp_path):
    root = write(tmp_path / "in", range(4), caption="same")
    (root / "copy.bmp").write_bytes(encoded(picture(2, (96, 80)), "BMP"))
    (root / "copy.txt").write_text("same", encoding="utf-8")
    built = Built(tmp_path, root)
    assert len(built.rows) == 4
    assert built.told["duplicates"] == [{"file": "copy.bmp", "same_as": "02.png"}]
    assert "files that show the same as another, which count once: 1 (copy.bmp = 02.png)" in built.told["warnings"]
    (root / "copy.txt").write_text("other", encoding="utf-8")
    assert "02.png and copy.bmp show the same and have different captions" in fault(tmp_path / "b", root)


# Train and val


def test_added_pictures_change_the_side_of_none(tmp_path):
    root = write(tmp_path / "in", range(30))
    before = [Built(tmp_path / "a", root, holdout=0.3, seed=seed) for seed in range(6)]
    write(root, range(30, 45))
    for seed, few in enumerate(before):
        more = Built(tmp_path / "a", root, holdout=0.3, seed=seed)
        assert few.val.keys() <= more.val.keys()
        assert few.train.keys() <= more.train.keys()
        assert not more.val.keys() & more.train.keys()
        assert more.told["val"] == {"pictures": len(more.val), "held_out": True}
        assert 5 <= len(more.val) <= 24
    assert len({tuple(one.val) for one in before}) == 6


def test_of_ten_pictures_one_is_held_out_at_least_and_of_nine_none(tmp_path):
    root = write(tmp_path / "in", range(10))
    for seed in range(4):
        built = Built(tmp_path / str(seed), root, holdout=0.001, seed=seed)
        assert (len(built.train), len(built.val)) == (9, 1)
    (root / "09.png").unlink()
    built = Built(tmp_path / "few", root)
    assert built.train.keys() == built.val.keys()
    assert built.told["val"] == {"pictures": 9, "held_out": False}
    assert built.told["skipped"] == [{"file": "09.txt", "reason": "the caption of no picture", "source": "pictures"}]


def test_where_none_is_held_out_ten_of_many_are_validated_on(tmp_path):
    built = Built(tmp_path, write(tmp_path / "in", range(25)), holdout=0)
    assert (len(built.train), len(built.val)) == (25, 10)
    assert built.val.items() <= built.train.items()


def test_regularization_pictures_are_trained_on_with_their_weight_and_never_held_out(tmp_path):
    root = write(tmp_path / "in", range(12), caption=None)
    others = write(tmp_path / "class", range(100, 130), caption="a dog {}")
    changes = {"regularization": str(others), "regularization_weight": 0.5, "instance_prompt": "sks", "holdout": 0.4}
    built = Built(tmp_path / "a", root, **changes)
    assert {row.source for row in built.val.values()} == {"pictures"}
    kinds = {row.source: (row.weight, row.text.partition(" ")[0]) for row in built.rows.values()}
    assert kinds == {"pictures": (1.0, "sks"), "regularization": (0.5, "a")}
    assert built.told["train"] == {"pictures": 12 - len(built.val), "regularization": 30}
    assert built.told["read"] == {"pictures": 12, "regularization": 30}
    assert {row["text"] for row in built.texts} == {"", "sks", *(f"a dog {n}" for n in range(100, 130))}
    # The instance prompt is not said of other members of the class.
    (others / "100.txt").unlink()
    shutil.copy(root / "03.png", others / "03.png")
    told = fault(tmp_path / "b", root, **changes)
    assert told.startswith("2 things")
    assert f"in {others}: 100.png has no caption; write one into 100.txt, or let" in told
    (others / "100.txt").write_text("a dog")
    (others / "03.txt").write_text("a dog")
    again = Built(tmp_path / "c", root, **changes)
    assert again.by_file()["03.png"].source == "pictures"
    assert any("03.png of pictures.regularization is also in pictures.folder" in one for one in again.told["warnings"])


# What cannot be used


def broken(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise))[:2000]


@pytest.fixture
def flawed(tmp_path):
    """A folder with one of every picture that cannot be used, among two that can."""
    root = write(tmp_path / "in", range(2))
    frames = [picture(number, (40, 40)) for number in range(3)]
    files = {
        "truncated.png": broken(1),
        "truncated.jpg": encoded(picture(3, (300, 300)), "JPEG")[:1500],
        "empty.webp": b"",
        "text.bmp": b"no picture",
        "apng.png": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "moves.webp": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "large.png": encoded(Image.new("1", (10_000, 9_000))),
        "line.png": encoded(Image.new("L", (2, 3000))),
        "phone.heic": b"\0\0\0\x18ftypheic",
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    (root / "link.png").symlink_to(tmp_path / "gone.png")
    return root


REASONS = {
    "truncated.png": "truncated",
    "truncated.jpg": "truncated",
    "empty.webp": "the file is empty",
    "text.bmp": "no JPEG, PNG, WebP or BMP picture",
    "apng.png": "it is animated: 3 pictures in one",
    "moves.webp": "it is animated: 3 pictures in one",
    "large.png": "10000 x 9000 are more than 89 million pixels",
    "line.png": "2 x 3000 is too narrow to be scaled",
    "phone.heic": "HEIC is not read: convert it to PNG or JPEG",
    "link.png": "No such file or directory",
}


@pytest.mark.filterwarnings("ignore:Image size")
def test_each_picture_that_cannot_be_used_is_told_with_its_reason_in_one_message(tmp_path, flawed):
    stems = fault(tmp_path, flawed, instance_prompt="x", resolution=512)
    assert "truncated.jpg, truncated.png have one stem" in stems
    (flawed / "truncated.jpg").rename(flawed / "cut.jpg")
    told = fault(tmp_path, flawed, instance_prompt="x", resolution=512)
    header, *lines = told.split("\n  ")
    assert header == "10 things in the folders of pictures have to be put right:"
    for name, reason in REASONS.items():
        name = name.replace("truncated.jpg", "cut.jpg")
        (line,) = (line for line in lines if line.startswith(f"{name} cannot be used"))
        assert reason in line
    # Allowed, they are left out, and each has its row.
    built = Built(tmp_path / "b", flawed, instance_prompt="x", resolution=512, max_bad_fraction=0.9)
    assert {row.file for row in built.rows.values()} == {"00.png", "01.png"}
    rows = {row["file"]: row["reason"] for row in built.told["skipped"]}
    assert rows.keys() == {name.replace("truncated.jpg", "cut.jpg") for name in REASONS}
    assert any("that cannot be used and are left out: 10 (" in warning for warning in built.told["warnings"])


def test_pictures_of_rare_modes_are_read_as_what_they_show(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 255, 0, 200, 0, 0])
    palette.paste(0, (0, 0, 32, 64))
    deep = np.full((64, 64), 256 * 100, np.uint16)
    files = {
        "cmyk.jpg": encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "JPEG", quality=95),
        "deep.png": encoded(Image.fromarray(deep)),
        "palette.png": encoded(palette, transparency=0),
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    built = Built(tmp_path, root, instance_prompt="x")
    colours = {}
    for row in built.rows.values():
        shown = geometry.pixels(
            pictures.open_rgb(tmp_path / "corpus/images" / row.image),
            geometry.place(row.id, row.size, row.bucket, Pictures(), 0),
        )
        colours[row.file] = [np.round((shown[:, 5, x].numpy() + 1) * 127.5).astype(int).tolist() for x in (5, 60)]
    assert colours["deep.png"] == [[100, 100, 100]] * 2
    assert colours["palette.png"] == [[255, 255, 255], [200, 0, 0]]
    red, green, blue = colours["cmyk.jpg"][0]
    assert (red > 200, green < 60, blue < 60) == (True, True, True)
    assert not built.told["skipped"]


def test_few_broken_pictures_of_many_are_left_out_by_name(tmp_path):
    root = write(tmp_path / "in", range(40))
    (root / "07.png").write_bytes(broken(1))
    (root / "08.png").write_bytes(b"")
    built = Built(tmp_path, root)
    assert {row["file"] for row in built.told["skipped"]} == {"07.png", "08.png"}
    assert len(built.rows) == 38
    assert any("07.png, 08.png" in warning for warning in built.told["warnings"])
    assert "2 things" in fault(tmp_path / "b", root, max_bad_fraction=0)


def test_all_faults_of_captions_pictures_and_masks_come_in_one_message_before_anything_is_written(tmp_path):
    root = write(tmp_path / "in", range(6))
    (root / "00.txt").write_bytes(b"the dog\x92s bone")
    (root / "01.txt").unlink()
    (root / "02.png").write_bytes(broken(2))
    (root / "03.jpg").write_bytes(encoded(picture(33), "JPEG"))
    (root / "04-mask.png").write_bytes(encoded(Image.new("L", (90, 80), 255)))
    (root / "05-mask.png").write_bytes(encoded(Image.new("L", (96, 80), 0)))
    told = fault(tmp_path, root, masks=True, regularization=str(tmp_path / "none"))
    header, *lines = told.split("\n  ")
    assert header == "7 things in the folders of pictures have to be put right:"
    for pattern in (
        r"03.jpg, 03.png have one stem",
        r"00.txt is not UTF-8: byte 7 is 0x92",
        r"02.png cannot be used \(.*truncated.*\)",
        r"01.png has no caption; write one into 01.txt",
        r"the mask 04-mask.png has 90 x 80 pixels and its picture 96 x 80",
        r"the mask 05-mask.png is black",
        r"in .*none: the image folder .*none does not exist; correct its path in pictures.regularization",
    ):
        assert sum(bool(re.match(pattern, line)) for line in lines) == 1, pattern


def test_of_many_faults_twenty_are_listed_and_the_others_counted(tmp_path):
    root = write(tmp_path / "in", range(40), caption=None)
    (root / "00.txt").write_text("one", encoding="utf-8")
    told = fault(tmp_path, root)
    assert told.startswith("39 things")
    assert len(told.splitlines()) == 22
    assert told.endswith("\n  and 19 more")


def test_bytes_of_cp1252_stop_the_corpus_not_the_training_and_every_such_file_is_named(tmp_path):
    root = write(tmp_path / "in", range(6))
    for number in (1, 4):
        (root / f"0{number}.txt").write_bytes(b"caf\xe9 \x92")
    told = fault(tmp_path, root, uncaptioned="skip")
    assert all(f'0{n}.txt is not UTF-8: byte 3 is 0xe9 (as cp1252 it says "café ’")' in told for n in (1, 4))


def test_no_text_is_read_or_written_in_the_machines_own_encoding(tmp_path):
    root = write(tmp_path / "in", range(3), caption="犬 {} é")
    (root / "metadata.jsonl").write_text('{"file_name": "00.png", "text": "ü"}\n', encoding="utf-8")
    code = f"""
import sys, warnings
sys.path.insert(0, {str(CHECKOUT / "scripts")!r})
from trainer.lora import corpus
from trainer.config import Pictures
warnings.simplefilter("error", EncodingWarning)
outputs = {{name: {str(tmp_path)!r} + f"/corpus/{{name}}.jsonl" for name in ("train", "val", "text", "summary")}}
corpus.build(Pictures(folder={str(root)!r}), 64, outputs)
assert "torch" not in sys.modules
"""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "warn_default_encoding", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert {row.text for row in corpus.read(tmp_path / "corpus/train.jsonl")} == {f"犬 {n} é" for n in range(3)}


def test_pictures_without_a_caption_stop_are_left_out_or_are_trained_on_without(tmp_path):
    root = write(tmp_path / "in", range(5))
    (root / "03.txt").unlink()
    (root / "04.txt").write_text("", encoding="utf-8")
    told = fault(tmp_path / "a", root)
    assert re.findall(r"(\d+).png has no caption", told) == ["03", "04"]
    left = Built(tmp_path / "b", root, uncaptioned="skip")
    assert [row["file"] for row in left.told["skipped"]] == ["03.png", "04.png"]
    assert {row["reason"] for row in left.told["skipped"]} == {"no caption"}
    assert len(left.rows) == 3
    empty = Built(tmp_path / "c", root, uncaptioned="empty")
    assert [row.text for row in empty.by_file().values() if row.file in ("03.png", "04.png")] == ["", ""]
    assert empty.told["captions"]["empty"] == 2
    assert empty.told["captions"]["from"] == {"none": 2, "sidecar": 3}
    assert Built(tmp_path / "d", root, instance_prompt="sks").by_file()["04.png"].text == "sks"


def test_a_folder_without_any_caption_is_one_sentence(tmp_path):
    root = write(tmp_path / "in", range(30), caption=None)
    told = fault(tmp_path, root)
    assert told.startswith(f"no picture in {root} has a caption; write captions into 01.txt beside 01.jpg")
    rows = "".join(json.dumps({"file_name": f"{n:02d}.png", "caption": "a"}) + "\n" for n in range(30))
    (root / "metadata.jsonl").write_text(rows, encoding="utf-8")
    assert "(metadata.jsonl, line 1: no caption of 00.png under `text`)" in fault(tmp_path, root)
    assert len(Built(tmp_path / "b", root, caption_column="caption").rows) == 30


def test_folders_that_are_missing_or_hold_nothing_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no .jpg, .jpeg, .png, .webp, .bmp pictures" in fault(tmp_path, tmp_path / "empty")
    assert "does not exist; correct its path in pictures.folder" in fault(tmp_path, tmp_path / "none")
    write(tmp_path / "kohya/10_sks", range(3))
    assert f"10_sks: a folder with 3 pictures: only those directly in {tmp_path / 'kohya'}" in fault(
        tmp_path, tmp_path / "kohya"
    )
    (tmp_path / "empty/a.heic").write_bytes(b"x")
    assert "a.heic cannot be used (HEIC is not read" in fault(tmp_path, tmp_path / "empty")
    with pytest.raises(TrainerError, match=r"pictures\.folder is not set"):
        corpus.build(Pictures(), 64, {name: tmp_path / name for name in FILES})
    with pytest.raises(TrainerError, match="run the stage that writes it"):
        next(corpus.read(tmp_path / "none.jsonl"))


def test_captions_that_are_passed_over_are_listed_with_a_warning(tmp_path):
    root = write(tmp_path / "in", range(2))
    (root / "01.caption").write_text("another", encoding="utf-8")
    built = Built(tmp_path, root)
    assert built.told["disagreements"] == [{"file": "01.png", "taken": "01.txt", "passed_over": "01.caption"}]
    assert any("01.caption for 01.txt" in warning for warning in built.told["warnings"])


def test_small_pictures_are_warned_of_and_kept(tmp_path):
    root = write(tmp_path / "in", range(3))
    built = Built(tmp_path, root, min_side=81)
    assert built.told["warnings"] == ["pictures with a side below pictures.min_side (81): 3 (00.png, 01.png, 02.png)"]
    assert len(built.rows) == 3


def test_masks_are_kept_beside_their_pictures_and_a_changed_one_changes_its_row(tmp_path):
    root = write(tmp_path / "in", range(3))
    mask = Image.new("L", (96, 80))
    mask.paste(255, (0, 0, 48, 80))
    (root / "01-mask.png").write_bytes(encoded(mask))
    built = Built(tmp_path / "a", root, masks=True)
    rows = built.by_file()
    assert [rows[f"0{n}.png"].mask is None for n in range(3)] == [True, False, True]
    assert built.images()[rows["01.png"].mask] == encoded(mask)
    assert built.told["masks"] == 1
    mask.paste(255, (0, 0, 50, 80))
    (root / "01-mask.png").write_bytes(encoded(mask))
    after = Built(tmp_path / "b", root, masks=True)
    changed = [row.file for key, row in after.rows.items() if row != built.rows[key]]
    assert changed == ["01.png"]
    assert after.told["digest"] != built.told["digest"]
    off = Built(tmp_path / "c", root)
    assert {row.mask for row in off.rows.values()} == {None}
    assert off.told["skipped"][0]["file"] == "01-mask.png"
    (root / "01-mask.png").unlink()
    assert any("there is no mask" in warning for warning in Built(tmp_path / "d", root, masks=True).told["warnings"])


# The demo's


def test_the_pictures_of_the_demo_are_the_same_every_time_and_make_a_corpus(tmp_path):
    for name in "ab":
        demo_pictures.make(tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    built = Built(tmp_path, tmp_path / "a", resolution=128)
    assert (len(built.rows), built.told["captions"]["unique"], built.told["warnings"]) == (12, 12, [])
    assert all("zwirl" in row.text for row in built.rows.values())
    assert len(built.told["buckets"]) >= 3
    assert len(built.train) >= 9
