"""Shards: what is written is read, damage is found."""

import pytest
import tiny_runs
import torch
from trainer import packs, shards
from trainer.errors import TrainerError
from trainer.samples import Samples
from trainer.standardization import Standardization


def test_rows_come_back_as_written(tmp_path):
    samples = tiny_runs.rows(7, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    assert len(shard) == 7
    for row, sample in zip(tiny_runs.read(shard), samples, strict=True):
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
    for row, sample in zip(tiny_runs.read(shard), samples, strict=True):
        for name, value in vars(sample).items():
            found = getattr(row, name)
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_a_batch_asks_for_the_rows_that_have_a_target_in_its_order(tmp_path, pack):
    samples = tiny_runs.sample_rows(pack, 6, 1)
    tiny_runs.write_shard(tmp_path / "a.safetensors", samples)
    shard = shards.Shard(tmp_path / "a.safetensors")
    queries = packs.get(pack).queries and tiny_runs.QUERIES
    batch = tiny_runs.batch(shard, range(6), queries)
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
    whole = tiny_runs.batch(shard, range(11), queries)
    sizes = [student + target for student, target in zip(whole.lengths, whole.counts, strict=True)]
    for tokens in (1, 20, 60, 10**9):
        parts = list(whole.split(tokens))
        first = 0
        for part in parts:
            end = first + len(part)
            assert len(part) == 1 or sum(sizes[first:end]) <= tokens
            assert end == 11 or sum(sizes[first : end + 1]) > tokens  # no smaller than need be
            expected = tiny_runs.batch(shard, range(first, end), queries)
            for name, value in vars(expected).items():
                found = getattr(part, name)
                if name == "at":  # all rows in their order may be named, or not
                    every = torch.arange(len(expected.student) if queries is None else queries * len(expected))
                    found, value = (every if it is None else it for it in (found, value))
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
            first = end
        assert first == 11


def test_damage_within_a_chunk_is_found_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2000)
    path = tmp_path / "0000-00.safetensors"
    tiny_runs.write_shard(path, tiny_runs.rows(40, 1))
    shard = shards.Shard(path)
    assert len(shard.chunks) > 5
    content = bytearray(path.read_bytes())
    content[-3] ^= 4  # in the rows of the last tensor
    path.write_bytes(content)
    chunks = range(len(shard.chunks) - 1)
    with pytest.raises(TrainerError, match=r"0000-00\.safetensors is damaged"):
        Samples.read([(shard, chunk) for chunk in chunks])
    assert not path.exists()


def test_a_shard_that_is_gone_when_it_is_read_is_told_as_missing(tmp_path):
    path = tmp_path / "0000-00.safetensors"
    tiny_runs.write_shard(path, tiny_runs.rows(4, 1))
    shard = shards.Shard(path)
    path.unlink()
    with pytest.raises(TrainerError, match=r"0000-00\.safetensors is missing"):
        Samples.read([(shard, 0)])


def test_where_rows_are_stored_in_bytes_the_chunks_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2000)
    found = []
    for storage in ("bf16", "int8"):
        path = tmp_path / f"{storage}.safetensors"
        header = {"inputs": "inputs", "skipped": []}
        shards.write(path, tiny_runs.rows(40, 1), header, (tiny_runs.STUDENT, tiny_runs.TEACHER), storage=storage)
        found.append(shards.Shard(path).chunks)
    assert found[0] == found[1]
