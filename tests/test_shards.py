"""Shards: what is written is read, damage is found."""

import pytest
import tiny_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import packs, shards
from trainer.batches import Order, collate
from trainer.errors import TrainerError
from trainer.standardization import Standardization


def test_rows_come_back_as_written(tmp_path):
    samples = tiny_runs.rows(7, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    assert len(shard) == 7
    for number, sample in enumerate(samples):
        row = shard.rows(number)
        assert (row.id, row.slots) == (sample.id, sample.slots)
        assert torch.equal(row.student, sample.student)
        assert torch.equal(row.target, sample.target)


def test_an_empty_shard_is_a_shard(tmp_path):
    tiny_runs.write_shard(tmp_path / "a.safetensors", [])
    assert len(shards.Shard(tmp_path / "a.safetensors")) == 0
    assert shards.why_stale(tmp_path / "a.safetensors", "inputs") is None


def test_every_flipped_bit_is_found(tmp_path):
    path = tmp_path / "a.safetensors"
    tiny_runs.write_shard(path, tiny_runs.rows(5, 1))
    good = path.read_bytes()
    generator = torch.Generator().manual_seed(3)
    for position in torch.randint(0, len(good), (150,), generator=generator).tolist():
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        assert shards.why_stale(path, "inputs") is not None, position


def test_truncated_missing_and_foreign_shards_are_told_apart(tmp_path):
    path = tmp_path / "a.safetensors"
    assert shards.why_stale(path, "inputs") == "missing"
    tiny_runs.write_shard(path, tiny_runs.rows(5, 1))
    assert shards.why_stale(path, "inputs") is None
    assert shards.why_stale(path, "others") == "made from other inputs"
    short = path.read_bytes()[:-10]
    path.write_bytes(short)
    assert "truncated" in shards.why_stale(path, "inputs")
    path.write_bytes(short)
    with pytest.raises(TrainerError, match=r"a\.safetensors is damaged"):
        shards.Shard(path)
    with pytest.raises(TrainerError, match=r"a\.safetensors is missing"):
        shards.Shard(path)


def test_a_damaged_shard_takes_the_list_of_its_block_with_it(tmp_path):
    path = tmp_path / "0003-01.safetensors"
    path.write_bytes(b"no shard")
    (tmp_path / "0003.json").write_text("{}")
    with pytest.raises(TrainerError):
        shards.Shard(path)
    assert [p.name for p in tmp_path.iterdir()] == ["0003-01.damaged"]


def test_the_moments_are_those_of_all_rows(tmp_path):
    samples = tiny_runs.rows(30, 1)
    for number in range(3):
        tiny_runs.write_shard(tmp_path / f"{number}.safetensors", samples[number::3])
    opened = [shards.Shard(tmp_path / f"{n}.safetensors") for n in range(3)]
    scale = Standardization.of(opened, floor=1e-6)
    target = torch.cat([s.target for s in samples]).float()
    assert torch.allclose(scale.target_mean, target.mean(0), atol=1e-5)
    assert torch.allclose(scale.target_std, target.std(0, correction=0), rtol=1e-4)


@pytest.mark.parametrize("pack", tiny_runs.PACKS[1:])
def test_rows_of_every_pack_come_back_as_written(tmp_path, pack):
    samples = tiny_runs.sample_rows(pack, 5, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    for number, sample in enumerate(samples):
        for name, value in vars(sample).items():
            found = getattr(shard.rows(number), name)
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_a_batch_asks_for_the_rows_that_have_a_target_in_its_order(tmp_path, pack):
    samples = tiny_runs.sample_rows(pack, 6, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    queries = packs.get(pack).queries and tiny_runs.QUERIES
    batch = collate([(shard, n) for n in range(6)], queries)
    places = [sample.target_at or range(len(sample.target)) for sample in samples]
    rows = [range(queries or len(sample.student)) for sample in samples]
    given = torch.tensor([100 * n + at for n, sample in enumerate(rows) for at in sample])
    assert batch.wanted(given).tolist() == [100 * n + at for n, sample in enumerate(places) for at in sample]
    assert (batch.slots is None) == (pack != "pixart")
    student, mask = batch.padded()
    for number, sample in enumerate(samples):
        assert torch.equal(student[number][mask[number]], sample.student)
    if batch.vision is not None:
        pictured = [100 * n + at for n, sample in enumerate(samples) for at in sample.vision_at]
        assert given[batch.vision_at].tolist() == pictured
        assert torch.equal(batch.vision, torch.cat([sample.vision for sample in samples]))
        assert batch.read.tolist() == [at >= 2 for sample in samples for at in sample.target_at]


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_a_split_batch_is_its_samples_by_themselves(tmp_path, pack):
    tiny_runs.write_shard(tmp_path / "a.safetensors", tiny_runs.sample_rows(pack, 11, 1))
    shard = shards.Shard(tmp_path / "a.safetensors")
    queries = packs.get(pack).queries and tiny_runs.QUERIES
    picks = [(shard, n) for n in range(11)]
    parts = list(collate(picks, queries).split(4))
    assert [len(part) for part in parts] == [4, 4, 3]
    for number, part in enumerate(parts):
        expected = collate(picks[4 * number : 4 * number + 4], queries)
        for name, value in vars(expected).items():
            found = getattr(part, name)
            if name == "at":  # all rows in their order may be named, or not
                every = torch.arange(len(expected.student) if queries is None else queries * len(expected))
                found, value = (every if it is None else it for it in (found, value))
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    window=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_an_epoch_has_every_sample_once_and_any_position_can_be_reached_directly(counts, window, seed):
    order = Order(counts, seed, window)
    everything = {(shard, n) for shard, count in enumerate(counts) for n in range(count)}
    stream = order.at(0, 3 * len(everything))
    for epoch in range(3):
        assert set(stream[epoch * len(everything) : (epoch + 1) * len(everything)]) == everything
    middle = len(stream) // 2
    assert Order(counts, seed, window).at(middle, len(stream) - middle) == stream[middle:]
