"""Devices: jobs of a machine spread over its GPUs, and memory is what was allowed or is free."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from filelock import FileLock
from trainer import devices
from trainer.devices import GIB
from trainer.errors import TrainerError


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A machine with 10 and 20 GiB free on its two GPUs."""
    free = [10 * GIB, 20 * GIB]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[getattr(device, "index", device)], 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(devices, "_claims", {})
    return tmp_path


def other_job(folder: Path, index: int) -> FileLock:
    lock = FileLock(folder / f"gguf-trainer-uuid-{index}.lock")
    lock.acquire(timeout=0)
    return lock


def test_auto_is_the_gpu_with_the_most_free_memory_and_stays_it(two_gpus):
    assert [devices.pick("auto").index for _ in range(2)] == [1, 1]


def test_auto_leaves_a_gpu_that_another_job_has_to_it(two_gpus):
    held = other_job(two_gpus, 1)
    assert devices.pick("auto").index == 0
    held.release()


def test_where_all_gpus_are_taken_the_freest_is_shared(two_gpus):
    held = [other_job(two_gpus, index) for index in range(2)]
    assert devices.pick("auto").index == 1
    for lock in held:
        lock.release()


def test_a_named_device_is_taken_as_it_is_and_an_unknown_one_refused(two_gpus):
    assert devices.pick("cuda:0").index == 0
    assert devices.pick("cuda").index == 0  # torch sets no memory limit for a device without a number
    with pytest.raises(TrainerError, match="is not here"):
        devices.pick("cuda:2")
    with pytest.raises(TrainerError, match="is unknown"):
        devices.pick("quantum")


def test_a_budget_is_what_was_asked_for_or_nearly_what_is_free(two_gpus):
    gpu = torch.device("cuda", 1)
    assert devices.budget(gpu, 6, 2, 64 * GIB) == devices.Budget(6 * GIB, 2 * GIB)
    auto = devices.budget(gpu, 0, 0, GIB)
    assert auto == devices.Budget(18 * GIB, GIB)
    assert devices.batch_tokens(gpu, auto) == 18 * 1024
    cpu = devices.budget(torch.device("cpu"), 6, 0, 1 << 60)
    assert cpu.device == cpu.ram
    assert 0 < cpu.ram < psutil.virtual_memory().total
