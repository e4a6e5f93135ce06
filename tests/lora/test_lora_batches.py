"""Batches of pictures: none is dropped or doubled, any position can be resumed, captions stay with their pictures."""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.errors import TrainerError
from trainer.lora import conditions
from trainer.lora.batches import Items, Loader, Order
from trainer.lora.conditions import Item, caption_digest
from trainer.lora.corpus import Picture, text_id

BUCKETS = ((128, 128), (192, 64), (64, 192))
DTYPE = torch.bfloat16


def row(number, bucket=None, text=None, weight=1.0, mask=None):
    bucket = bucket or BUCKETS[number % 3]
    text = f"picture {number}" if text is None else text
    id = f"{number * 977:016x}"
    what = {"width": 300, "height": 200, "bucket": bucket, "mask": mask, "weight": weight, "source": "pictures"}
    return Picture(id=id, file=f"{number:02d}.png", text=text, text_id=text_id(text), image=f"{id}.png", **what)


def latents(row, variants, time_ids):
    random = torch.Generator().manual_seed(int(row.id, 16))
    shape = (4, row.bucket[1] // 8, row.bucket[0] // 8)
    tensors = {}
    for variant in range(variants):
        tensors[f"{variant}/mean"] = torch.randn(shape, generator=random)
        tensors[f"{variant}/std"] = torch.rand(shape, generator=random)
        if time_ids:
            tensors[f"{variant}/time_ids"] = torch.tensor([1333, 513, 0, variant, 128, 128], dtype=torch.int32)
        if row.mask:
            tensors[f"{variant}/mask"] = torch.rand(shape[1:], generator=random)
    return Item("key", tensors, {"bucket": list(row.bucket), "variants": variants})


def embeddings(text):
    value = int(text_id(text), 16) % 2**20
    tensors = {"embeds": torch.full((7, 3), value, dtype=DTYPE), "pooled": torch.full((2,), value, dtype=DTYPE)}
    return Item("key", tensors, {"caption": caption_digest(text), "tokens": 7, "truncated": 0})


def shards(run, split, items, count=2, **header):
    paths = []
    for number in range(count):
        paths.append(run / "shards" / split / f"0000-{number:02d}.safetensors")
        mine = {id: item for id, item in items.items() if int(id, 16) % count == number}
        conditions.write(paths[-1], mine, {"skipped": [], **header})
    return paths


def items(run, rows, variants=3, time_ids=True):
    """The items of some rows, and of the empty caption."""
    pictures = shards(run, "train", {it.id: latents(it, variants, time_ids) for it in rows})
    captions = shards(run, "text", {text_id(it): embeddings(it) for it in {row.text for row in rows} | {""}})
    return Items(rows, pictures, captions)


@pytest.fixture
def some(tmp_path):
    """Eleven pictures in three buckets."""
    return items(tmp_path, [row(number) for number in range(11)])


def load(some, count, **more):
    loader = Loader(some, **({"seed": 1, "dropout": 0.3, "position": 0, "size": 4, "pin": False} | more))
    try:
        return [next(loader)[0] for _ in range(count)]
    finally:
        loader.close()


def single(batch):
    """What each item of a batch is, by its position."""
    found = {}
    for part in batch.parts:
        for n, position in enumerate(part.positions):
            tensors = [part.latents[n], part.time_ids[n], part.weights[n], *part.conditions[n].values()]
            found[position] = (part.ids[n], tuple(tuple(it.flatten().tolist()) for it in tensors))
    return found


def singles(batches):
    return {position: it for batch in batches for position, it in single(batch).items()}


# -- the order ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    size=st.integers(1, 14),
    seed=st.integers(0, 9),
    start=st.integers(0, 200),
)
def test_every_item_comes_once_an_epoch_and_any_position_can_be_reached(sizes, size, seed, start):
    buckets = [bucket for bucket, count in enumerate(sizes) for _ in range(count)]
    total = len(buckets)
    order = Order(buckets, seed, size)
    stream = [order[at] for at in range(5 * total)]
    for epoch in range(5):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
    start %= 5 * total
    assert Order(buckets, seed, size)[start] == stream[start]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), size=st.integers(1, 9), epoch=st.integers(0, 6))
def test_most_batches_are_of_one_bucket(sizes, size, epoch):
    """All that can be made of whole buckets, but one that may go into the gap between two epochs."""
    buckets = [bucket for bucket, count in enumerate(sizes) for _ in range(count)]
    order, total = Order(buckets, 1, size), len(buckets)
    first = -(-epoch * total // size)
    batches = [range(n * size, (n + 1) * size) for n in range(first, (epoch + 1) * total // size)]
    pure = sum(len({buckets[order[at]] for at in batch}) == 1 for batch in batches)
    assert pure >= sum(count // size for count in sizes) - 1


def test_epochs_and_seeds_differ():
    buckets = [0] * 20 + [1] * 20
    one, other = Order(buckets, 1, 4), Order(buckets, 2, 4)
    epochs = [[order[at] for at in range(first, first + 40)] for order in (one, other) for first in (0, 40)]
    assert len({tuple(epoch) for epoch in epochs}) == 4


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_loader_that_starts_in_the_middle_goes_on_as_one_from_the_start(some):
    every = singles(load(some, 14))
    assert sorted(every) == list(range(56))
    for position in (4, 20, 44, 7):
        assert all(every[at] == it for at, it in singles(load(some, 3, position=position)).items())


def test_batches_hold_every_picture_once_an_epoch_though_buckets_are_smaller_than_a_batch(some):
    drawn = singles(load(some, 11, size=8))
    for epoch in range(8):
        assert len({drawn[at][0] for at in range(epoch * 11, (epoch + 1) * 11)}) == 11


@pytest.mark.parametrize("processes", [2, 3])
def test_the_shares_of_processes_make_up_the_batch(some, processes):
    whole = load(some, 6, size=5)
    shares = [load(some, 6, size=5, rank=rank, processes=processes) for rank in range(processes)]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert singles(parts) == single(batch)
        assert sum(map(len, parts)) == 5
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_processes_than_pictures_leave_some_without_any(some):
    shares = [load(some, 2, size=2, rank=rank, processes=3) for rank in range(3)]
    assert sorted(len(share[0]) for share in shares) == [0, 1, 1]
    assert [len(list(share[0].split(100))) for share in shares if not len(share[0])] == [0]


def test_a_step_counts_all_items_of_the_batch(some):
    loader = Loader(some, seed=1, dropout=0.0, position=0, size=5, pin=False, rank=1, processes=2)
    batch, count = next(loader)
    loader.close()
    assert (len(batch), count) == (3, 5)


def test_parts_are_of_one_bucket_and_of_so_many_places_at_most(some):
    [batch] = load(some, 1, size=11)
    assert len(batch.parts) == 3
    for limit, most in ((1, 1), (2 * 256, 2), (10**9, 4)):
        parts = list(batch.split(limit))
        assert max(map(len, parts)) == most
        assert all(part.latents.shape[2:].numel() * len(part) <= limit or len(part) == 1 for part in parts)
        assert {at: it for part in parts for at, it in single(replace(batch, parts=(part,))).items()} == single(batch)
    assert batch.largest == 256


def test_a_part_goes_to_a_device_whole(some):
    [batch] = load(some, 1, size=11)
    moved = batch.to(torch.device("meta"))
    for part in moved.parts:
        tensors = [part.latents, part.weights, part.time_ids, *(it for own in part.conditions for it in own.values())]
        assert {it.device.type for it in tensors} == {"meta"}


def test_latents_are_drawn_from_the_posterior_of_a_variant_anew_each_time(some):
    drawn = load(some, 60, size=11)
    seen = Counter()
    for batch in drawn[:40]:
        for part in batch.parts:
            for n, id in enumerate(part.ids):
                variant = int(part.time_ids[n, 3])
                seen[variant] += 1
                item = some._pictures[id].read(id, f"{variant}/")
                noise = (part.latents[n] - item["mean"]) / item["std"]
                assert abs(noise.mean()) < 0.25
                assert 0.8 < noise.std() < 1.2
    assert len(seen) == 3
    assert min(seen.values()) > 100
    values = {tuple(part.latents[0].flatten().tolist()) for batch in drawn for part in batch.parts}
    assert len(values) == 180


def test_a_caption_is_dropped_as_a_whole_and_nothing_else_changes_with_it(some):
    kept, dropped = (singles(load(some, 60, dropout=dropout)) for dropout in (0.0, 0.3))
    share = 0
    for at, (id, tensors) in kept.items():
        other = dropped[at]
        assert (other[0], other[1][:3]) == (id, tensors[:3])  # latents, time ids, weight
        if other[1] != tensors:
            share += 1 / len(kept)
            empty = embeddings("").tensors
            assert other[1][3:] == tuple(tuple(empty[name].flatten().tolist()) for name in ("embeds", "pooled"))
    assert 0.2 < share < 0.4


def test_dropping_captions_without_an_empty_one_is_refused(tmp_path):
    rows = [row(1)]
    items(tmp_path, rows)
    shards(tmp_path, "text", {rows[0].text_id: embeddings(rows[0].text)})
    paths = [sorted((tmp_path / "shards" / split).glob("*")) for split in ("train", "text")]
    without = Items(rows, *paths)
    with pytest.raises(TrainerError, match="text_dropout"):
        load(without, 1)
    assert len(load(without, 1, dropout=0.0)) == 1


def test_no_pictures_are_told_at_once(tmp_path):
    with pytest.raises(TrainerError, match="no picture"):
        load(items(tmp_path, []), 1)


def test_of_validation_nothing_is_drawn(some):
    batch = some.validated(range(11))
    assert sorted(position for part in batch.parts for position in part.positions) == list(range(11))
    for part in batch.parts:
        for n, id in enumerate(part.ids):
            assert torch.equal(part.latents[n], some._pictures[id].read(id, "0/")["mean"])
            caption = some.rows[part.positions[n]].text
            assert torch.equal(part.conditions[n]["embeds"], embeddings(caption).tensors["embeds"])


def test_types_are_those_that_were_written(some):
    for part in some.trained([(n, n) for n in range(11)], 1, 0.5).parts:
        assert part.latents.dtype == part.weights.dtype == torch.float32
        assert part.time_ids.dtype == torch.int32
        assert part.time_ids[0, :2].tolist() == [1333, 513]
        assert {it.dtype for own in part.conditions for it in own.values()} == {DTYPE}


def test_weights_masks_and_no_time_ids(tmp_path):
    rows = [row(n, BUCKETS[0], weight=0.5 + n, mask="m.png" if n == 2 else None) for n in range(4)]
    given = items(tmp_path, rows, time_ids=False)
    [part] = given.validated(range(4)).parts
    assert part.weights.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert part.time_ids is None
    assert torch.equal(part.mask[2], given._pictures[rows[2].id].read(rows[2].id)["0/mask"])
    assert torch.equal(part.mask[[0, 1, 3]], torch.ones(3, 16, 16))
    assert [half.mask.shape[0] for half in part.split(3)] == [3, 1]
    [alone] = given.validated([1]).parts
    assert alone.mask is None


def test_the_largest_batch_is_of_the_largest_bucket(tmp_path):
    rows = [row(n, bucket) for n, bucket in enumerate(((64, 64), (128, 192), (128, 128)))]
    batch = items(tmp_path, rows).largest(5)
    assert len(batch) == 5
    assert {part.latents.shape[2:] for part in batch.parts} == {(24, 16)}


def test_swapping_two_captions_changes_two_items_of_the_stream(some, tmp_path):
    before = singles(load(some, 11, dropout=0.0))
    rows = list(some.rows)
    rows[3], rows[8] = (
        replace(rows[one], text=rows[other].text, text_id=rows[other].text_id) for one, other in ((3, 8), (8, 3))
    )
    paths = [sorted((tmp_path / "shards" / split).glob("*")) for split in ("train", "text")]
    after = singles(load(Items(rows, *paths), 11, dropout=0.0))
    changed = {at for at in before if before[at] != after[at]}
    assert len(changed) == 8  # each of the two in four epochs
    assert {before[at][0] for at in changed} == {rows[3].id, rows[8].id}
    assert all(before[at][1][:3] == after[at][1][:3] for at in before)


# -- what does not belong together -------------------------------------------------------------------------------------


def test_a_caption_that_is_not_the_one_that_was_encoded_is_refused_by_the_pictures_name(some, tmp_path):
    paths = [sorted((tmp_path / "shards" / split).glob("*")) for split in ("train", "text")]
    wrong = [replace(it, text="another") if it.file == "03.png" else it for it in some.rows]
    with pytest.raises(TrainerError, match=r"caption of 03\.png"):
        Items(wrong, *paths)
    unknown = [replace(it, text_id=text_id("x"), text="x") if it.file == "03.png" else it for it in some.rows]
    with pytest.raises(TrainerError, match=r"caption of 03\.png"):
        Items(unknown, *paths)


def test_latents_of_another_bucket_or_none_are_refused_by_the_pictures_name(some, tmp_path):
    paths = [sorted((tmp_path / "shards" / split).glob("*")) for split in ("train", "text")]
    wrong = [replace(it, bucket=(64, 64)) if it.file == "03.png" else it for it in some.rows]
    with pytest.raises(TrainerError, match=r"latents of 03\.png"):
        Items(wrong, *paths)
    with pytest.raises(TrainerError, match=r"latents of 77\.png"):
        Items([*some.rows, row(77)], *paths)


def test_pictures_that_were_skipped_or_whose_caption_was_are_left_out(tmp_path):
    rows = [row(number) for number in range(6)]
    made = {it.id: latents(it, 1, False) for it in rows if it is not rows[1]}
    captions = {it.text_id: embeddings(it.text) for it in rows if it is not rows[4]} | {text_id(""): embeddings("")}
    pictures = shards(tmp_path, "train", made, skipped=[{"id": rows[1].id}])
    given = Items(rows, pictures, shards(tmp_path, "text", captions, skipped=[{"id": rows[4].text_id}]))
    assert [it.file for it in given.rows] == ["00.png", "02.png", "03.png", "05.png"]


@pytest.mark.parametrize("split", ["train", "text"])
def test_a_damaged_shard_is_set_aside_to_be_made_again(some, tmp_path, split):
    path = tmp_path / "shards" / split / "0000-01.safetensors"
    listed = path.with_name("0000.json")
    listed.touch()
    data = bytearray(path.read_bytes())
    data[-200:] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(TrainerError, match=rf"{split}/0000-01.*damaged; run the same command again"):
        load(some, 6, size=11)
    assert path.with_suffix(".damaged").exists()
    assert not path.exists()
    assert not listed.exists()


def test_a_missing_shard_is_told(some, tmp_path):
    paths = [sorted((tmp_path / "shards" / split).glob("*")) for split in ("train", "text")]
    paths[0][0].unlink()
    with pytest.raises(TrainerError, match="missing"):
        Items(some.rows, *paths)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_batches_are_read_ahead_and_no_further_than_two(some):
    size = 4
    loader = Loader(some, seed=1, dropout=0.0, position=0, size=size, pin=False)
    deadline = time.monotonic() + 60
    while loader.bytes_read < 3 * size * 2000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    loader.close()
    item = 2 * 4 * 4 * 256 + 24 + 7 * 3 * 2 + 4
    assert 0 < loader.bytes_read <= 4 * size * item
    assert not loader._thread.is_alive()


def test_one_variant_of_a_picture_is_read(some):
    before = some.bytes_read
    some.validated([0])
    latents = 4 * 16 * 16 * 4
    assert some.bytes_read - before <= 2 * latents + 24 + 200
