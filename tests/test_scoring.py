"""Figures of validation and evaluation: each sample and row counts as said, however they are put into batches."""

import numpy as np
import pytest
import tiny_runs
import torch
from trainer import packs, scoring
from trainer.shards import Shard


def cosine(one, other):
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def scored(folder, pack, size, damage=0.5):
    """Scores of predictions that are the targets with noise, the samples, and the predictions by sample."""
    samples = tiny_runs.sample_rows(pack, 12, 3)
    tiny_runs.write_shard(folder / "a.safetensors", samples)
    noise = torch.Generator().manual_seed(4)
    predicted = [s.target.float() + damage * torch.randn(s.target.shape, generator=noise) for s in samples]
    left = iter(predicted)

    def predict(batch):
        return torch.cat([next(left) for _ in range(len(batch))])

    queries = packs.get(pack).queries and tiny_runs.QUERIES
    stored = scoring.batches([Shard(folder / "a.safetensors")], size, queries)
    mean = torch.cat([s.target.float() for s in samples]).mean(0)
    return scoring.score(predict, stored, mean, packs.get(pack).metric), samples, predicted


@pytest.mark.parametrize("pack", ["mageflow", "qwen_image"])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_figures_of_token_aligned_packs_are_those_of_a_loop_over_rows(tmp_path, pack, size):
    scores, samples, predicted = scored(tmp_path, pack, size)
    rows, slices = [], []
    for sample, made in zip(samples, predicted, strict=True):
        found = [cosine(*pair) for pair in zip(made.double().numpy(), sample.target.double().numpy(), strict=True)]
        rows += [(value, at in sample.vision_at) for value, at in zip(found, sample.target_at, strict=True)]
        read = [value for value, at in zip(found, sample.target_at, strict=True) if at >= sample.start]
        slices.append((np.mean(read), bool(sample.vision_at)))
    metrics = scores.metrics()
    expected = {
        "cos": np.mean([value for value, _ in rows]),
        "cos_slice": np.mean([value for value, _ in slices]),
        "cos_edit": np.mean([value for value, pictured in slices if pictured]),
        "cos_t2i": np.mean([value for value, pictured in slices if not pictured]),
    }
    if pack == "mageflow":
        expected["cos_vis"] = np.mean([value for value, under in rows if under])
        expected["cos_txt"] = np.mean([value for value, under in rows if not under])
        assert len({round(float(value), 4) for value in expected.values()}) == len(expected)
    else:
        assert not {"cos_vis", "cos_txt"} & metrics.keys()  # rows under pictures are not learnt
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert list(scores.by_sample.values()) == pytest.approx([value for value, _ in slices], abs=1e-6)
    assert "cos_eos" not in metrics


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_figures_do_not_depend_on_the_batches(tmp_path, pack):
    one, other = (scored(tmp_path, pack, size)[0].metrics() for size in (1, 7))
    assert one == pytest.approx(other, abs=1e-6)
    assert packs.get(pack).metric in one


def test_rows_that_are_not_read_count_for_no_worst_row(tmp_path):
    _, samples, _ = scored(tmp_path, "mageflow", 4)
    wrong = iter([torch.where(torch.tensor(s.target_at)[:, None] < s.start, -1, 1) * s.target.float() for s in samples])
    stored = scoring.batches([Shard(tmp_path / "a.safetensors")], 1, None)
    scores = scoring.score(lambda batch: next(wrong), stored, torch.zeros(tiny_runs.TEACHER), "cos_slice")
    metrics = scores.metrics()
    assert metrics["cos_slice"] == pytest.approx(1)
    assert metrics["worst_row_cos"] == pytest.approx(1)
    assert metrics["cos"] < 1
