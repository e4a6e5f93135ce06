"""Several processes that train together (on a CPU, over gloo): the same result, stopped and resumed, or failing."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from trainer import checkpoints, processes, train_process, training
from trainer.errors import TrainerError

TESTS = Path(__file__).parent


def task(settings, inputs):
    return {
        "settings": settings.model_dump(),
        "configfiles": [],
        "overrides": {},
        "log": str(inputs.run / "logs" / "train.log"),
        "output": str(inputs.run / "trained.safetensors"),
    }


def start(settings, inputs, count=2):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "scripts"), str(TESTS)])}
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "launch_training.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps([count, task(settings, inputs)]))
    process.stdin.close()
    return process


def ended(process):
    """Its exit status and what it said."""
    said = process.stderr.read()
    return process.wait(120), said


def wait_for(inputs, text, seconds=120):
    log = inputs.run / "logs" / "train.log"
    for _ in range(10 * seconds):
        if log.exists() and text in log.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"{text!r} did not come: {log.read_text() if log.exists() else 'no log'}")


def tensors(inputs, name="state"):
    return load_file(inputs.run / "checkpoints" / f"{name}.safetensors")


def made(folder, **train):
    settings = tiny_runs.settings(
        folder, **({"steps": 300, "save_every": 50, "val_every": 100, "device": "cpu"} | train)
    )
    return settings, tiny_runs.make(settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of two processes from the start to the end."""
    settings, inputs = made(tmp_path_factory.mktemp("together"))
    status, said = ended(start(settings, inputs))
    assert status == 0, said
    return inputs


def test_two_processes_train_as_one_does(undisturbed, tmp_path):
    settings, inputs = made(tmp_path)
    train_process.run(task(settings, inputs))
    alone, together = (list(csv.DictReader((it.run / "metrics.csv").open())) for it in (inputs, undisturbed))
    assert [row["step"] for row in alone] == [row["step"] for row in together]
    for one, other in zip(alone[:5], together, strict=False):  # later, what bf16 rounds off has grown
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=0.01)
        assert float(one["grad_norm"]) == pytest.approx(float(other["grad_norm"]), rel=0.05)
    figures = [float(rows[-1]["val_cos"]) for rows in (alone, together)]
    assert figures[0] == pytest.approx(figures[1], abs=0.01)


def test_two_processes_stopped_and_resumed_end_in_the_same_bytes(undisturbed, tmp_path):
    settings, inputs = made(tmp_path)
    process = start(settings, inputs)
    wait_for(inputs, "step 25/300")
    process.send_signal(signal.SIGTERM)
    status, said = ended(process)
    assert (status, "as asked; the same command resumes there" in said) == (1, True)
    assert "Traceback" not in said
    assert 25 <= checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")["step"] < 300
    assert ended(start(settings, inputs))[0] == 0
    one, other = tensors(undisturbed), tensors(inputs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_of_two_processes_goes_on_with_one_at_the_same_sample(undisturbed, tmp_path):
    shutil.copytree(undisturbed.run, tmp_path / "runs" / "tiny")
    settings = tiny_runs.settings(tmp_path, steps=310, save_every=50, val_every=100, device="cpu")
    inputs = training.Inputs.read(settings)
    train_process.run(task(settings, inputs))
    assert checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")["step"] == 310
    log = (inputs.run / "logs" / "train.log").read_text()
    assert "resuming at step 300 of 310" in log


def test_a_process_that_is_killed_ends_the_training_in_words(tmp_path):
    settings, inputs = made(tmp_path, steps=100000)
    process = start(settings, inputs)
    wait_for(inputs, "step 25/100000")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[1]), signal.SIGKILL)
    status, said = ended(process)
    assert status == 1
    assert "ended with status -9" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [("cuda:1", 2, "train.device 'cuda:1' is one device"), ("auto", 3, "2 GPUs are here"), ("auto", 2, "")],
)
def test_more_processes_than_devices_are_refused_before_anything_starts(monkeypatch, device, count, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if not words:
        return processes.check(count, device)
    with pytest.raises(TrainerError, match=words):
        processes.check(count, device)
