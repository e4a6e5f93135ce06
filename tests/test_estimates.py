"""Estimates: the README's table is what the script computes, and their parts are what can be counted."""

import importlib
import sys
from dataclasses import replace

import estimate as script
import pytest
import torch
from trainer import adapters, packs
from trainer.batches import Batch
from trainer.estimates import Machine, estimate, sample_bytes, training_memory
from workflow import CHECKOUT


def test_the_table_in_the_readme_is_what_the_script_prints():
    readme = (CHECKOUT / "README.md").read_text()
    assert "\n".join(script.table(script.MACHINES)) in readme


def test_the_table_of_loras_in_the_readme_is_what_the_script_prints():
    readme = (CHECKOUT / "README.md").read_text()
    assert "\n".join(script.lora_table(script.MACHINES)) in readme


def test_a_base_that_is_offloaded_takes_less_memory_and_more_time(tmp_path):
    (tmp_path / "1.png").touch()
    found = []
    for offload in (False, True):
        lora = {"base_precision": "bf16", "offload": offload}
        settings = script.of_pack("flux_lora", pictures={"folder": str(tmp_path)}, lora=lora)
        found.append(estimate(settings, Machine("m", 60, 3)))
    here, away = found
    assert away.training.gpu < here.training.gpu / 3
    # 23.8 GB twice a step, at 12 GB a second.
    assert away.training_hours - here.training_hours == pytest.approx(500 * 2 * 23.8 / 12 / 3600)


ADAPTERS = [name for name in packs.names() if "adapters" in packs.get(name).kinds]


@pytest.mark.parametrize("name", ADAPTERS)
def test_training_memory_counts_the_parameters_of_the_adapter(name):
    settings = script.of_pack(name)
    with torch.device("meta"):
        adapter = adapters.fresh(settings.adapter)
    parameters = sum(parameter.numel() for parameter in adapter.parameters())
    least = training_memory(settings, 1e12, sample_bytes(settings)).least  # all rows of the seed table occur
    assert least == pytest.approx(16 * parameters / 1e9, rel=0.01)


@pytest.mark.parametrize("name", ADAPTERS)
def test_training_memory_counts_what_autograd_keeps_in_a_block(name):
    settings, work = script.of_pack(name), packs.get(name).work
    shape, train = settings.adapter, settings.train
    train.batch_size, shape.width = 2, 128
    counted, kept = [], []
    for depth in (1, 2):
        shape.depth = depth
        memory = training_memory(settings, 10, 1)
        counted.append(memory.cpu_step - memory.least)
        kept.append(_kept(adapters.fresh(shape.model_copy(update={"vocabulary": None})), settings, work) / 1e9)
    assert counted[1] - counted[0] == pytest.approx(kept[1] - kept[0], rel=0.05)


def _kept(adapter, settings, work):
    """Bytes that the adapter's forward pass keeps for the backward pass, in bf16."""
    shape, size = settings.adapter, settings.train.batch_size
    tokens, rows = work.student_tokens, shape.queries or work.student_tokens
    student, target = torch.randn(size * tokens, shape.student_dim), torch.empty(size * rows, shape.teacher_dim)
    batch = Batch((tokens,) * size, (rows,) * size, (0,) * size, student, target)
    if shape.vision_dim:
        batch = replace(batch, vision=torch.randn(1, shape.vision_dim), vision_at=torch.zeros(1, dtype=torch.int64))
    weights = {parameter.data_ptr() for parameter in adapter.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        adapter(batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident set is Linux's to tell")
def test_scaled_training_takes_as_much_memory_as_estimated(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    sizes = {"width": 1024, "depth": 2, "batch": 8, "samples": 24}
    estimated, measured = importlib.import_module("memory").ratio("training", "mageflow", tmp_path, **sizes)
    assert estimated == pytest.approx(measured, rel=0.1)


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
    size = sample_bytes(settings)
    waiting = 4 * 32 * size / 1e9
    assert training_memory(settings, 1e6, size).rows == pytest.approx(2 * 0.512 + waiting)
    settings.train.processes = 4
    assert training_memory(settings, 1e6, size).rows == pytest.approx(4 * 2 * 0.512 + waiting)
    assert training_memory(settings, 10, size).rows == pytest.approx(4 * 10 * size / 1e9 + waiting)
