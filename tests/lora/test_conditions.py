"""Shards of items: the same bytes for the same items, read and verified one by one, found wherever they are."""

import json

import pytest
import torch
from safetensors import safe_open
from trainer.lora import conditions
from trainer.lora.conditions import Item, Pool, Shard


def item(seed, key=None, **info):
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "0/mean": torch.randn(4, 8, 6, generator=random),
        "0/time_ids": torch.arange(6, dtype=torch.int32),
        "1/mean": torch.randn(4, 8, 6, generator=random),
        "10/mean": torch.randn(4, 8, 6, generator=random),
    }
    return Item(key or f"key-{seed}", tensors, info)


def text(seed, length, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(seed)
    return Item(f"text-{seed}", {"embeds": torch.randn(length, 5, generator=random).to(dtype)}, {"tokens": length})


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "0000-00.safetensors"
    items = {f"{seed:016x}": item(seed, bucket=[64, 128]) for seed in range(5)}
    conditions.write(path, items, {"inputs": "what", "skipped": []})
    return path, items


def damage(path, id, name):
    """Turn a bit of a tensor."""
    stored = Shard(path)._stored[f"{id}/{name}"]
    data = bytearray(path.read_bytes())
    data[stored.start + stored.bytes - 1] ^= 1
    path.write_bytes(data)


def test_the_order_of_items_changes_no_byte(written, tmp_path):
    path, items = written
    again = tmp_path / "again.safetensors"
    turned = {id: Item(it.key, dict(reversed(it.tensors.items())), it.info) for id, it in reversed(items.items())}
    conditions.write(again, turned, {"skipped": [], "inputs": "what"})
    assert again.read_bytes() == path.read_bytes()


def test_items_come_back_as_they_were_in_the_types_they_have(tmp_path):
    types = (torch.bfloat16, torch.float16, torch.float32)
    items = {f"{n:016x}": text(n, 7 + n, dtype) for n, dtype in enumerate(types)} | {"00000000000000ff": item(3)}
    path = tmp_path / "a.safetensors"
    conditions.write(path, items, {})
    shard = Shard(path)
    for id, written in items.items():
        found = shard.item(id)
        assert (found.key, found.info) == (written.key, written.info)
        assert found.tensors.keys() == written.tensors.keys()
        for name, tensor in written.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor)
    with safe_open(path, "pt") as file:  # the library reads it, too
        assert torch.equal(file.get_tensor("00000000000000ff/1/mean"), items["00000000000000ff"].tensors["1/mean"])


def test_only_what_is_wanted_of_an_item_is_read(written):
    path, items = written
    shard = Shard(path)
    found = shard.read("0000000000000002", "1/")
    assert list(found) == ["mean"]
    assert torch.equal(found["mean"], items["0000000000000002"].tensors["1/mean"])
    assert shard.bytes_read == found["mean"].nbytes


def test_a_damaged_tensor_is_found_and_the_other_items_stay_readable(written):
    path, items = written
    damage(path, "0000000000000002", "1/mean")
    shard = Shard(path)
    assert not shard.whole()
    with pytest.raises(ValueError, match="0000000000000002"):
        shard.read("0000000000000002", "1/")
    for id in items.keys() - {"0000000000000002"}:
        shard.item(id)


def test_a_tensor_that_was_taken_for_another_is_found(written):
    """As by a header whose offsets were changed."""
    path, _ = written
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    one, other = (f"000000000000000{n}/0/mean" for n in (1, 2))
    entries[one], entries[other] = entries[other], entries[one]
    path.write_bytes(data[:8] + json.dumps(entries, separators=(",", ":")).encode().ljust(length) + data[8 + length :])
    assert not Shard(path).whole()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:100], lambda data: b""])
def test_a_truncated_shard_is_not_opened(written, change):
    path, _ = written
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError):  # noqa: PT011
        Shard(path)


def test_a_header_that_was_changed_is_not_believed(written):
    path, _ = written
    data = path.read_bytes()
    assert data.count(b"key-3") == 1
    path.write_bytes(data.replace(b"key-3", b"key-4"))
    with pytest.raises(ValueError, match="checksum"):
        Shard(path)


def test_a_shard_of_another_format_is_not_used(written, monkeypatch):
    path, _ = written
    monkeypatch.setattr(conditions, "FORMAT", 99)
    assert Pool(path.parent).get(path) is None


def test_a_pool_gives_an_item_from_any_file_that_has_it_whole(written):
    path, items = written
    id = "0000000000000002"
    conditions.write(path.with_name("0007-01.moved"), {id: items[id]}, {})
    damage(path, id, "1/mean")
    found = Pool(path.parent).take({it: items[it].key for it in items})
    assert found.keys() == items.keys()
    assert torch.equal(found[id].tensors["1/mean"], items[id].tensors["1/mean"])
    assert Pool(path.parent).take({id: "another key"}) == {}
    damage(path.with_name("0007-01.moved"), id, "0/mean")
    assert Pool(path.parent).take({id: items[id].key}) == {}


def test_a_pool_notices_files_that_change(written):
    path, _ = written
    pool = Pool(path.parent)
    id = "0000000000000002"
    assert pool.holds(path, id, "key-2")
    conditions.write(path, {id: item(9)}, {})
    assert not pool.holds(path, id, "key-2")
    assert pool.holds(path, id, "key-9")
    path.unlink()
    assert pool.take({id: "key-9"}) == {}


def test_what_is_not_finite_is_found():
    assert conditions.finite([torch.zeros(3), torch.arange(3)])
    for value in (float("nan"), float("inf")):
        assert not conditions.finite([torch.zeros(3), torch.tensor([0.0, value])])
