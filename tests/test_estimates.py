"""Estimates: the README's table is what the script computes, and their parts are what can be counted."""

import estimate as script
import pytest
import torch
from trainer import adapters, packs
from trainer.estimates import Machine, estimate, sample_bytes
from workflow import CHECKOUT


def test_the_table_in_the_readme_is_what_the_script_prints():
    readme = (CHECKOUT / "README.md").read_text()
    assert "\n".join(script.table(script.MACHINES)) in readme


@pytest.mark.parametrize("name", [name for name in packs.names() if "adapters" in packs.get(name).kinds])
def test_training_memory_counts_the_parameters_of_the_adapter(name):
    settings = script.of_pack(name)
    with torch.device("meta"):
        adapter = adapters.fresh(settings.adapter)
    parameters = sum(parameter.numel() for parameter in adapter.parameters())
    settings.train.batch_size = 0  # no activations
    weights = estimate(settings, Machine("any", 1, 1)).training - 2
    assert weights == pytest.approx(16 * parameters / 1e9, rel=0.01)


def test_a_slower_disk_or_processor_takes_longer_and_twice_the_prompts_twice_the_time():
    settings = script.of_pack("pixart")
    fast, slow, cold = (estimate(settings, Machine("m", *rates)) for rates in ((60, 3), (6, 3), (60, 0.05)))
    assert slow.precompute_hours == pytest.approx(10 * fast.precompute_hours)
    assert cold.precompute_hours > fast.precompute_hours
    assert cold.training_hours > fast.training_hours
    settings.corpus.n_train, settings.corpus.n_val = 2 * settings.corpus.n_train, 2 * settings.corpus.n_val
    assert estimate(settings, Machine("m", 60, 3)).precompute_hours == pytest.approx(
        2 * fast.precompute_hours, rel=2e-3
    )


def test_a_sample_is_its_rows_in_bf16():
    assert sample_bytes(script.of_pack("pixart")) == 2 * (40 * 4096 + 30 * 1024)
    assert sample_bytes(script.of_pack("llada_image")) == 2 * (256 * 2560 + 55 * 1024)
    assert sample_bytes(script.of_pack("qwen_image")) == 2 * (37 * 4096 + 211 * 1024 + 160 * 4096)


def test_the_shards_of_qwen_image_are_no_larger_than_published_ones():
    settings = script.of_pack("qwen_image")
    assert sample_bytes(settings) * (settings.samples("train") + settings.samples("val")) < 170e9


def test_the_rows_that_training_mixes_are_two_windows_of_each_process_or_all_there_are():
    settings = script.of_pack("pixart")
    machine = Machine("any", 1, 1)
    assert estimate(settings, machine).shuffled == pytest.approx(2 * 0.512)
    settings.train.processes = 4
    assert estimate(settings, machine).shuffled == pytest.approx(4 * 2 * 0.512)
    assert estimate(settings, machine, samples=10).shuffled == pytest.approx(4 * 10 * sample_bytes(settings) / 1e9)
