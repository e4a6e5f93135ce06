"""Latents and embeddings are computed once: when what they are made of changes, and for nothing else."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_conditions as tiny
import torch
from trainer import shard_index
from trainer.control import Requests
from trainer.errors import StoppedError, TrainerError
from trainer.lora import conditions, precompute
from trainer.lora.conditions import Shard
from trainer.lora.models import base
from trainer.precompute import discard as discard_block


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return tiny.base(tmp_path_factory.mktemp("models") / "sdxl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, record):
    """A run of a dozen pictures with corpus and shards; to be copied."""
    run = tmp_path_factory.mktemp("finished") / "run"
    tiny.draw(run, 12)
    tiny.everything(run, tiny.settings(run), record)
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def encoded(monkeypatch):
    """How many pictures and captions went through the models."""
    counts = {"pictures": 0, "captions": 0, "loaded": 0}

    def counted(kind, name, what):
        before = getattr(kind, name)

        def call(*args):
            counts[what] += len(args[1]) if what != "loaded" else 1
            return before(*args)

        monkeypatch.setattr(kind, name, call)

    counted(base.Vae, "encode", "pictures")
    counted(base.TextEncoder, "encode", "captions")
    for kind in (precompute.Latents, precompute.Embeddings):
        counted(kind, "load", "loaded")
    return counts


def undisturbed(run, given, record, blocks=1):
    """The shards that a run of the same pictures has that was computed at once."""
    other = run.with_name("undisturbed")
    shutil.copytree(run / "mine", other / "mine")
    tiny.everything(other, tiny.settings(other, given.pictures.model_dump(exclude={"folder"})), record, blocks)
    return other


def assert_as(run, other, *splits):
    for split in splits or ("train", "val", "text"):
        one, two = tiny.files(run, split), tiny.files(other, split)
        assert sorted(one) == sorted(two)
        assert [name for name in one if one[name] != two[name]] == []


def forked(function, *args):
    """A process that calls a function and ends, with what is loaded here; its number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# -- what is computed again --------------------------------------------------------------------------------------------


def test_a_second_time_computes_nothing_and_loads_nothing(run, record, encoded):
    before = tiny.files(run), tiny.files(run, "text")
    tiny.everything(run, tiny.settings(run), record)
    assert encoded == {"pictures": 0, "captions": 0, "loaded": 0}
    assert (tiny.files(run), tiny.files(run, "text")) == before


def test_pictures_that_are_validated_on_as_well_are_encoded_once(tmp_path, record, encoded):
    run = tmp_path / "run"
    tiny.draw(run, 3)
    tiny.everything(run, tiny.settings(run), record)
    assert encoded == {"pictures": 3, "captions": 4, "loaded": 2}
    assert len(tiny.items(run, "val")) == 3


def test_an_edited_picture_is_the_only_one_that_is_encoded(run, record, encoded):
    tiny.picture(run / "mine" / "04.png", 99, tiny.SIZES[1])
    given = tiny.settings(run)
    tiny.everything(run, given, record)
    assert (encoded["pictures"], encoded["captions"]) == (1, 0)
    assert_as(run, undisturbed(run, given, record))


def test_renaming_pictures_encodes_nothing_and_changes_no_byte(run, record, encoded):
    before = tiny.files(run)
    for suffix in (".png", ".txt"):
        (run / "mine" / f"05{suffix}").rename(run / "mine" / f"zz{suffix}")
    tiny.everything(run, tiny.settings(run), record)
    assert encoded == {"pictures": 0, "captions": 0, "loaded": 0}
    assert tiny.files(run) == before
    assert "zz.png" in [row.file for row in tiny.items(run).rows]


def test_swapping_two_captions_encodes_nothing_and_tells_training(run, record, encoded):
    before = tiny.files(run)
    texts = {row.file: row.text for row in tiny.items(run).rows}
    one, other = run / "mine" / "03.txt", run / "mine" / "08.txt"
    text = one.read_text()
    one.write_text(other.read_text())
    other.write_text(text)
    tiny.everything(run, tiny.settings(run), record)
    assert encoded == {"pictures": 0, "captions": 0, "loaded": 0}
    after = tiny.files(run)
    assert {name for name in before if before[name] != after[name]} == {"0000.json"}
    swapped = {row.file: row.text for row in tiny.items(run).rows}
    assert {name for name in texts if texts[name] != swapped[name]} == {"03.png", "08.png"}


def test_a_new_caption_is_the_only_one_that_is_encoded(run, record, encoded):
    (run / "mine" / "03.txt").write_text("another caption")
    tiny.everything(run, tiny.settings(run), record)
    assert (encoded["pictures"], encoded["captions"]) == (0, 1)


def changed(record, folder):
    """As if the files of a part were others."""
    files = [it | ({"sha256": "0" * 64} if it["name"].startswith(f"{folder}/") else {}) for it in record.files]
    return replace(record, files=files)


@pytest.mark.parametrize(
    ("folder", "pictures", "captions"),
    [("vae", 12, 0), ("text_encoder_2", 0, 13), ("tokenizer", 0, 13), ("unet", 0, 0), ("scheduler", 0, 0)],
)
def test_another_part_of_the_model_renews_what_it_made(run, record, encoded, folder, pictures, captions):
    lists = tiny.everything(run, tiny.settings(run), changed(record, folder))
    assert (encoded["pictures"], encoded["captions"]) == (pictures, captions)
    train, val, text = lists
    assert shard_index.index({"train": [train], "val": [val], "text": [text]}, "tiny")["text"]["samples"] == 13


def test_another_type_of_embeddings_renews_these(run, record, encoded):
    tiny.everything(run, tiny.settings(run, precompute={"teacher_dtype": "bf16"}), record)
    assert (encoded["pictures"], encoded["captions"]) == (0, 13)
    dtypes = {
        it.dtype
        for path in tiny.shard_paths(run, "text")
        for it in Shard(path).read(next(iter(Shard(path).items))).values()
    }
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("pictures", "count"),
    [({"resolution": 192}, 12), ({"flip": True}, 24), ({"crop": "random", "variants": 2}, 24), ({"holdout": 0.3}, 0)],
)
def test_another_geometry_renews_all_pictures_and_no_caption(run, record, encoded, pictures, count):
    given = tiny.settings(run, pictures)
    tiny.everything(run, given, record)
    assert (encoded["pictures"], encoded["captions"]) == (count, 0)
    assert_as(run, undisturbed(run, given, record))


def test_removed_pictures_go_and_are_not_missed(run, record, encoded):
    for number in range(6):
        (run / "mine" / f"{number:02d}.png").unlink()
    given = tiny.settings(run)
    tiny.everything(run, given, record)
    assert encoded["pictures"] == 0
    assert_as(run, undisturbed(run, given, record))


@pytest.mark.parametrize("blocks", [[0, 1, 2], [2, 0, 1]])
def test_pictures_that_move_to_other_shards_are_not_encoded_again(run, record, encoded, blocks):
    """More shards than before, and fewer again; in whatever order blocks are made."""
    given = tiny.settings(run)
    other = undisturbed(run, given, record, 3)
    counted = dict(encoded)
    for split in ("train", "val", "text"):
        for block in blocks:
            tiny.fill(run, given, record, split, block, 3)
    assert encoded == counted
    assert_as(run, other)
    tiny.everything(run, given, record)
    assert encoded == counted
    assert len(tiny.shard_paths(run, "train")) == 2


def test_blocks_that_are_made_at_the_same_time_do_not_disturb_each_other(run, record):
    """Though all find what they need in the same old shards, which they replace meanwhile."""
    given = tiny.settings(run)
    other = undisturbed(run, given, record, 3)

    def make(block):
        for split in ("train", "val", "text"):
            tiny.fill(run, given, record, split, block, 3)

    children = [forked(make, block) for block in range(3)]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    tiny.everything(run, given, record, 3)  # which removes the last of what had been moved
    assert_as(run, other)


def test_one_by_one_or_together_the_bytes_are_the_same(tmp_path, record):
    """Pictures that come one after another, each the only new one, give what all at once do."""
    run = tmp_path / "run"
    tiny.draw(run, 6)
    later = sorted((run / "mine").glob("*.png"))[3:]
    for path in later:
        path.rename(path.with_suffix(".later"))
    for path in [None, *later]:
        if path:
            path.with_suffix(".later").rename(path)
        given = tiny.settings(run)
        tiny.everything(run, given, record)
    assert_as(run, undisturbed(run, given, record))


# -- stops, kills, damage ----------------------------------------------------------------------------------------------


class AfterSome:
    """Asked to stop after some looks."""

    def __init__(self, looks):
        self.left = looks

    def stop(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("looks", [1, 4, 9])
def test_a_stop_keeps_what_was_computed(finished, tmp_path, record, encoded, monkeypatch, looks):
    run = tmp_path / "run"
    shutil.copytree(finished / "mine", run / "mine")
    given = tiny.settings(run)
    tiny.build(run, given)
    monkeypatch.setattr(tiny, "Requests", lambda run: AfterSome(looks))
    with pytest.raises(StoppedError):
        tiny.fill(run, given, record)
    first = encoded["pictures"]
    assert first in (looks - 1, looks - 2)  # one or two looks were before a model was needed
    monkeypatch.setattr(tiny, "Requests", lambda run: AfterSome(2))
    with pytest.raises(StoppedError):
        tiny.fill(run, given, record)
    monkeypatch.setattr(tiny, "Requests", Requests)
    tiny.everything(run, given, record)
    assert encoded["pictures"] == 12
    assert_as(run, finished)


def test_a_discarded_block_keeps_whole_shards_and_nothing_else(finished, tmp_path, record, encoded, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished / "mine", run / "mine")
    given = tiny.settings(run)
    tiny.build(run, given)
    monkeypatch.setattr(tiny, "Requests", lambda run: AfterSome(10))
    with pytest.raises(StoppedError):
        tiny.fill(run, given, record)
    folder = run / "shards" / "train"
    assert sorted(it.suffix for it in folder.iterdir()) == [".partial", ".safetensors"]
    (whole,) = tiny.shard_paths(run, "train")
    (folder / "0001-00.partial").touch()  # of another block
    discard_block(folder / "0000.json")
    assert sorted(it.name for it in folder.iterdir()) == sorted([whole.name, "0001-00.partial"])
    (folder / "0001-00.partial").unlink()
    monkeypatch.setattr(tiny, "Requests", Requests)
    tiny.everything(run, given, record)
    assert encoded["pictures"] == 12 + 1  # which was computed of the shard that was not whole
    assert_as(run, finished)


def test_a_stop_before_the_model_is_loaded_loads_none(run, record, encoded, monkeypatch):
    tiny.picture(run / "mine" / "04.png", 99)
    given = tiny.settings(run)
    tiny.build(run, given)
    monkeypatch.setattr(tiny, "Requests", lambda run: AfterSome(0))
    with pytest.raises(StoppedError, match="the same command"):
        tiny.fill(run, given, record)
    assert encoded["loaded"] == 0


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_block_that_was_killed_is_made_as_if_it_had_not_been(finished, tmp_path, record, count):
    run = tmp_path / "run"
    shutil.copytree(finished / "mine", run / "mine")
    given = tiny.settings(run)
    tiny.build(run, given)
    before, left = precompute.Latents.make, count

    def make(*args):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*args)

    def killed():
        precompute.Latents.make = make
        tiny.fill(run, given, record)

    assert exit_code(forked(killed)) == -signal.SIGKILL
    tiny.everything(run, given, record)
    assert_as(run, finished)


@pytest.mark.parametrize("split", ["train", "text"])
def test_of_a_damaged_shard_what_is_damaged_is_computed(run, finished, record, encoded, split):
    path = tiny.shard_paths(run, split)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if split == "train":  # as training leaves it
        path.rename(path.with_suffix(".damaged"))
    shutil.rmtree(run / "shards" / "val")  # which has the same pictures
    tiny.everything(run, tiny.settings(run), record)
    assert encoded["pictures"] + encoded["captions"] == 1
    assert_as(run, finished)


def test_a_shard_whose_header_is_damaged_is_made_again(run, finished, record):
    path = tiny.shard_paths(run, "train")[0]
    path.write_bytes(path.read_bytes()[:100])
    shutil.rmtree(run / "shards" / "val")
    tiny.everything(run, tiny.settings(run), record)
    assert_as(run, finished)


def test_what_others_left_is_not_touched_while_it_is_needed(run, record):
    """A block removes no file that another block's items are still in."""
    given = tiny.settings(run)
    before = {id for path in tiny.shard_paths(run, "train") for id in Shard(path).items}
    tiny.fill(run, given, record, "train", 0, 4)
    files = [path for path in (run / "shards" / "train").iterdir() if path.suffix in (".safetensors", ".moved")]
    assert {id for path in files for id in Shard(path).items} == before


# -- bad items ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Pictures that the VAE gives no numbers for: those with a red corner."""
    before = base.Vae.encode

    def encode(vae, pixels):
        mean, std = before(vae, pixels)
        if pixels[0, 0, 0, 0] > 0.99 and pixels[0, 1, 0, 0] < -0.99:
            mean[0, 0, 0, 0] = torch.nan
        return mean, std

    monkeypatch.setattr(base.Vae, "encode", encode)


def spoil(run, *numbers):
    for number in numbers:
        path = run / "mine" / f"{number:02d}.png"
        tiny.picture(path, number)
        image = tiny.Image.open(path)
        image.paste((255, 0, 0), (0, 0, 40, 40))
        image.save(path)


def test_latents_that_are_no_numbers_are_skipped_by_the_pictures_name(run, record, broken, encoded, caplog):
    spoil(run, 7)
    given = tiny.settings(run)
    precompute.log.propagate = True
    train, *_ = tiny.everything(run, given, record)
    assert "skipped 07.png: values that are not finite" in caplog.text
    assert [dict(it["skipped"]) for it in train["shards"] if it["skipped"]] == [{"values that are not finite": 1}]
    assert sum(it["samples"] for it in train["shards"]) == 11
    assert "07.png" not in [row.file for row in tiny.items(run).rows]
    count = encoded["pictures"]
    caplog.clear()
    for seed in (77, 78):  # shards are made again, and the bad one is known
        tiny.picture(run / "mine" / "03.png", seed)
        tiny.build(run, given)
        tiny.fill(run, given, record)
    assert "skipped 07.png" in caplog.text
    assert encoded["pictures"] == count + 2


def test_too_many_bad_pictures_stop_the_run_and_are_named(run, record, broken):
    spoil(run, 2, 7)
    given = tiny.settings(run)
    with pytest.raises(TrainerError, match=r"2 of 12 pictures cannot be used .*not finite.*0[27]\.png, 0[27]\.png"):
        tiny.everything(run, given, record)
    tiny.everything(run, tiny.settings(run, {"max_bad_fraction": 0.5}), record)
    assert len(tiny.items(run)) == 10


def test_a_picture_that_cannot_be_read_is_skipped_until_it_can(run, finished, record, encoded):
    given = tiny.settings(run)
    rows = [json.loads(line) for line in (run / "corpus" / "train.jsonl").read_text().splitlines()]
    path = run / "corpus" / "images" / rows[0]["image"]
    data = path.read_bytes()
    shutil.rmtree(run / "shards")
    path.write_bytes(data[:50])
    content = tiny.fill(run, given, record)
    assert sum(it["samples"] for it in content["shards"]) == 11
    path.write_bytes(data)
    tiny.fill(run, given, record)
    assert encoded["pictures"] == 12
    assert_as(run, finished, "train")


def test_captions_that_are_cut_off_are_counted_and_listed(run, record, caplog):
    (run / "mine" / "03.txt").write_text("many words " * 60)
    precompute.log.propagate = True
    for _ in range(2):  # also when nothing is to be computed
        caplog.clear()
        *_, text = tiny.everything(run, tiny.settings(run), record)
        assert sum(it["truncated"] for it in text["shards"]) == 1
        assert 'cuts off the end of 1 captions: "many words' in caplog.text
    info = next(it for path in tiny.shard_paths(run, "text") for it in Shard(path).items.values() if it["truncated"])
    assert info["tokens"] == 77
    assert info["truncated"] > 400


def test_out_of_memory_is_told_with_the_picture(run, record, monkeypatch):
    tiny.picture(run / "mine" / "04.png", 99)

    def encode(vae, pixels):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(base.Vae, "encode", encode)
    with pytest.raises(TrainerError, match=r"out of memory on cpu while 04\.png was encoded"):
        tiny.everything(run, tiny.settings(run), record)


# -- what is made ------------------------------------------------------------------------------------------------------


def test_variants_are_what_the_vae_gives_of_their_own_pixels(tmp_path, record):
    from trainer import pictures
    from trainer.lora import geometry, models

    run = tmp_path / "run"
    tiny.draw(run, 3)
    shown = tiny.Image.new("L", tiny.SIZES[1])
    shown.paste(255, (0, 0, 60, 70))
    shown.save(run / "mine" / "01-mask.png")
    given = tiny.settings(run, {"crop": "random", "variants": 2, "flip": True, "masks": True})
    tiny.everything(run, given, record)
    vae = models.get("sdxl")(Path(record.path)).vae(torch.device("cpu"))
    for row in tiny.items(run).rows:
        shard = next(it for it in map(Shard, tiny.shard_paths(run, "train")) if row.id in it.items)
        image = pictures.open_rgb(run / "corpus" / "images" / row.image)
        assert shard.items[row.id]["variants"] == 4
        for variant in range(4):
            placement = geometry.place(row.id, row.size, row.bucket, given.pictures, variant)
            mean, std = vae.encode(geometry.pixels(image, placement)[None])
            found = shard.read(row.id, f"{variant}/")
            assert torch.equal(found["mean"], mean[0])
            assert torch.equal(found["std"], std[0])
            assert found["mean"].dtype == found["std"].dtype == torch.float32
            assert tuple(found["time_ids"].tolist()) == placement.time_ids
            assert ("mask" in found) == (row.file == "01.png")


@pytest.mark.parametrize(
    ("family", "names", "captions"),
    [
        ("flux", {"0/mean", "0/std"}, {"embeds", "pooled"}),
        ("qwen_image", {"0/mean", "0/std"}, {"embeds"}),
        ("z_image", {"0/mean"}, {"embeds"}),
    ],
)
def test_items_of_other_families(tmp_path, family, names, captions):
    """Of Z-Image the mode of the posterior is trained on."""
    run = tmp_path / "run"
    tiny.draw(run, 2)
    tiny.everything(run, tiny.settings(run, pack=f"{family}_lora"), tiny.base(tmp_path / family, family))
    for split, expected in (("train", names), ("text", captions)):
        assert {
            name for it in map(Shard, tiny.shard_paths(run, split)) for id in it.items for name in it.item(id).tensors
        } == expected
    items = tiny.items(run)
    one, other = (items.trained([(0, at)], 1, 0.0).parts[0].latents for at in (0, 1))
    assert torch.equal(one, other) == (family == "z_image")


def test_captions_are_encoded_once_each_and_the_empty_one_always(run):
    ids = sorted(id for path in tiny.shard_paths(run, "text") for id in Shard(path).items)
    texts = [f"a picture, number {number}" for number in range(12)] + [""]
    assert ids == sorted(conditions.caption_digest(text)[:16] for text in texts)


def test_no_name_of_a_file_is_in_a_shard(run):
    for data in tiny.files(run).values():
        assert b".png" not in data


def test_a_block_without_pictures_has_empty_shards(tmp_path, record):
    run = tmp_path / "run"
    tiny.draw(run, 1)
    given = tiny.settings(run)
    tiny.build(run, given)
    lists = [tiny.fill(run, given, record, "train", block, 3) for block in range(3)]
    assert sum(it["samples"] for content in lists for it in content["shards"]) == 1
    assert [len(content["shards"]) for content in lists] == [2, 2, 2]
