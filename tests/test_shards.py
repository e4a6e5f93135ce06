"""Shards: what is written is read, damage is found."""

import pytest
import tiny_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import shards
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


def test_rows_without_slots_come_back_as_written_and_carry_no_ids_in_a_batch(tmp_path):
    samples = tiny_runs.seedless_rows(5, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    assert all(torch.equal(shard.rows(n).target, sample.target) for n, sample in enumerate(samples))
    assert shard.rows(3).slots == []
    batch = collate([(shard, n) for n in range(5)], tiny_runs.QUERIES)
    assert batch.slots is None
    assert [len(part.target) for part in batch.split(3)] == [3 * tiny_runs.QUERIES, 2 * tiny_runs.QUERIES]


def test_the_rows_of_a_batch_that_have_a_target_are_packed_in_its_order(tmp_path):
    for samples in (tiny_runs.rows(6, 1), tiny_runs.seedless_rows(6, 1)):
        tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
        shard = shards.Shard(tmp_path / "a.safetensors")
        batch = collate([(shard, n) for n in range(6)], tiny_runs.QUERIES)
        rows = torch.arange(6)[:, None] * 100 + torch.arange(tiny_runs.QUERIES)
        expected = [100 * n + slot for n, sample in enumerate(samples) for slot in range(len(sample.target))]
        assert batch.packed(rows[..., None])[:, 0].tolist() == expected


def test_a_split_batch_is_the_batch(tmp_path):
    tiny_runs.write_shard(tmp_path / "a.safetensors", tiny_runs.rows(11, 1))
    shard = shards.Shard(tmp_path / "a.safetensors")
    batch = collate([(shard, n) for n in range(11)], tiny_runs.QUERIES)
    parts = list(batch.split(4))
    assert [len(p) for p in parts] == [4, 4, 3]
    assert torch.equal(torch.cat([p.target for p in parts]), batch.target)
    for part in parts:
        assert part.counts.sum() == len(part.target)
        assert part.mask.any(0).all()


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
