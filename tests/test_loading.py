"""Loading: the order of samples is fixed, every byte is read once an epoch, processes share every batch."""

import time
import weakref

import pytest
import tiny_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import packs, shards
from trainer.loading import Chunk, Loader, Order, chunks_of
from trainer.samples import Samples


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Three shards of pixart samples in many chunks, of unlike sizes."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 3000)
    files = []
    for number, count in enumerate((23, 0, 40)):
        files.append(tmp_path / f"0000-{number:02d}.safetensors")
        tiny_runs.write_shard(files[-1], tiny_runs.rows(count, number + 1))
    return [shards.Shard(file) for file in files]


def load(opened, count, pack="pixart", **more):
    """Some batches, and the loader."""
    queries = packs.get(pack).queries and tiny_runs.QUERIES
    loader = Loader(opened, queries, **({"seed": 1, "window": 9000, "position": 0, "size": 8, "pin": False} | more))
    try:
        return [next(loader) for _ in range(count)], loader
    finally:
        loader.close()


def marks(batches):
    """What tells samples apart: their first student row."""
    found = []
    for batch, _ in batches:
        first = torch.tensor([0, *batch.lengths]).cumsum(0)[:-1]
        found += [tuple(row) for row in batch.student[first].tolist()]
    return found


@settings(max_examples=50, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=20),
    window=st.integers(1, 200),
    seed=st.integers(0, 99),
    position=st.integers(0, 300),
)
def test_an_epoch_has_every_sample_once_and_any_position_can_be_reached_directly(chunks, window, seed, position):
    chunks = [Chunk(shard, number, samples, size) for number, (shard, samples, size) in enumerate(chunks)]
    order = Order(chunks, seed, window)

    def stream(position, count):
        found = []
        for window, start in Order(chunks, seed, window_bytes).after(position):
            places = [(chunk, n) for chunk in window.chunks for n in range(chunk.samples)]
            found += [places[number] for number in window.order[start:]]
            if len(found) >= count:
                return found[:count]

    window_bytes = window
    total = order.total
    everything = {(chunk, n) for chunk in chunks for n in range(chunk.samples)}
    from_start = stream(0, max(3 * total, position + total))
    for epoch in range(3):
        assert set(from_start[epoch * total : (epoch + 1) * total]) == everything
    assert stream(position, total) == from_start[position : position + total]
    for held in order.epoch(0)[:-1]:
        assert sum(chunk.bytes for chunk in held.chunks) >= window


def test_samples_of_the_whole_corpus_mix(opened):
    order = Order(chunks_of(opened), 1, 9000)
    assert len(order.epoch(0)) > 3
    assert any(len({chunk.shard for chunk in window.chunks}) == 2 for window in order.epoch(0))
    assert [w.chunks for w in order.epoch(0)] != [w.chunks for w in order.epoch(1)]


def test_batches_are_the_samples_of_the_stream_whatever_the_window(opened):
    everything = sorted(
        mark
        for shard in opened
        if len(shard)
        for mark in marks([(tiny_runs.batch(shard, range(len(shard)), tiny_runs.QUERIES), 0)])
    )
    for window in (1, 9000, 10**9):
        batches, _ = load(opened, 63, window=window, size=1)
        assert sorted(marks(batches)) == everything
        wide, _ = load(opened, 7, window=window, size=9)  # as many samples
        assert sorted(marks(wide)) == everything


def test_a_loader_that_starts_in_the_middle_goes_on_as_one_from_the_start(opened):
    every, _ = load(opened, 20)
    for position in (8, 56, 64, 104):
        batches, _ = load(opened, 5, position=position)
        for (one, rows), (other, expected) in zip(batches, every[position // 8 :], strict=False):
            assert rows == expected
            assert torch.equal(one.student, other.student)
            assert torch.equal(one.target, other.target)


def test_every_byte_is_read_once_an_epoch(opened):
    size = sum(chunk.bytes for chunk in chunks_of(opened))
    _, loader = load(opened, 3 * 9, size=7)  # three epochs of 63 samples
    ahead = 2 * 12000  # at most two windows of the fourth
    assert 3 * size <= loader.bytes_read <= 3 * size + ahead


def test_a_corpus_of_one_window_is_read_once(opened):
    _, loader = load(opened, 27, size=7, window=10**9)
    assert loader.bytes_read == sum(chunk.bytes for chunk in chunks_of(opened))


def test_two_windows_are_in_memory_at_most(opened, monkeypatch):
    held, most = [], 0
    read = Samples.read

    def counted(chunks):
        samples = read(chunks)
        held.append(weakref.ref(samples.rows["student"]))
        return samples

    monkeypatch.setattr(Samples, "read", counted)
    loader = Loader(opened, tiny_runs.QUERIES, seed=1, window=9000, position=0, size=8, pin=False)
    for _ in range(30):
        time.sleep(0.02)  # it reads and makes all that it does ahead
        most = max(most, sum(it() is not None for it in held))
        next(loader)
    loader.close()
    assert len(held) > 10
    assert most == 2


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_the_shares_of_processes_make_up_the_batch(tmp_path, pack):
    path = tmp_path / "a.safetensors"
    tiny_runs.write_shard(path, tiny_runs.sample_rows(pack, 30, 1))
    whole, _ = load([shards.Shard(path)], 5, pack)
    shares = [load([shards.Shard(path)], 5, pack, rank=rank, processes=3)[0] for rank in range(3)]
    for number, (batch, rows) in enumerate(whole):
        parts = [share[number] for share in shares]
        assert [part[1] for part in parts] == [rows] * 3 == [len(batch.target)] * 3
        assert sorted(marks(parts)) == sorted(marks([(batch, rows)]))
        assert max(len(part) for part, _ in parts) - min(len(part) for part, _ in parts) <= 1


def test_samples_of_like_length_stand_together_in_a_batch(opened):
    batches, _ = load(opened, 5, window=10**9)
    assert all(list(batch.lengths) == sorted(batch.lengths) for batch, _ in batches)
