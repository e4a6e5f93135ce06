"""Several processes that train together (on a CPU, over gloo): the same result, stopped and resumed, or failing."""

import csv
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_runs
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from trainer import checkpoints, control, processes, status, train_process
from trainer.adapter_task import Inputs
from trainer.config import Train
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


def start(settings, inputs, *places, **more):
    """Start training as the rule does, with more places to import from and more in the environment."""
    places = [TESTS.parent / "scripts", TESTS, *places]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))} | more
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "launch_training.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps(task(settings, inputs)))
    process.stdin.close()
    return process


def ended(process):
    """Its exit status and what it said."""
    said = process.stderr.read()
    return process.wait(120), said


def wait_for(inputs, text, seconds=300):
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
        folder, **({"steps": 300, "save_every": 50, "val_every": 100, "device": "cpu", "processes": 2} | train)
    )
    return settings, tiny_runs.make(settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of two processes from the start to the end."""
    settings, inputs = made(tmp_path_factory.mktemp("together"))
    status, said = ended(start(settings, inputs))
    assert status == 0, said
    return inputs


def test_two_processes_train_as_one_does(undisturbed, tmp_path, monkeypatch):
    settings, inputs = made(tmp_path, processes=1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as some machines set for programs of their own
    monkeypatch.setenv("RANK", "1")
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
    assert (inputs.run / "logs" / "train.log").read_text().count("as asked") == 1
    assert 25 <= checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")["step"] < 300
    assert ended(start(settings, inputs))[0] == 0
    one, other = tensors(undisturbed), tensors(inputs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_of_two_processes_goes_on_with_one_at_the_same_sample(undisturbed, tmp_path):
    shutil.copytree(undisturbed.run, tmp_path / "runs" / "tiny")
    settings = tiny_runs.settings(tmp_path, steps=310, save_every=50, val_every=100, device="cpu")
    inputs = Inputs.read(settings)
    train_process.run(task(settings, inputs))
    assert checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")["step"] == 310
    log = (inputs.run / "logs" / "train.log").read_text()
    assert "resuming at step 300 of 310" in log


def test_a_request_to_stop_that_waits_for_training_comes_before_all_else(tmp_path):
    settings, inputs = made(tmp_path, processes=1)
    (control.folder(inputs.run) / "stop").parent.mkdir()
    (control.folder(inputs.run) / "stop").touch()
    with pytest.raises(SystemExit):
        train_process.run(task(settings, inputs))
    assert "before training began" in (inputs.run / "logs" / "train.log").read_text()
    assert not (inputs.run / "checkpoints").exists()


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


# What Python runs first in every process.
FULL = """
import errno, safetensors.torch

def full(tensors, *more, **options):
    if any(name.startswith("optimizer.") for name in tensors):
        raise OSError(errno.ENOSPC, "No space left on device")
    save(tensors, *more, **options)

save, safetensors.torch.save_file = safetensors.torch.save_file, full
"""


def test_gradients_are_sent_in_their_own_type(tmp_path, monkeypatch):
    settings, _ = made(tmp_path, processes=1)
    trainer = tiny_runs.trainer(settings)
    sent = []
    monkeypatch.setattr(processes, "reduce", lambda tensor, how: sent.append(tensor) or 2 * tensor)
    trainer.together.size = 2
    loader = trainer.loader()
    trainer._step(*next(loader))
    loader.close()
    large = [tensor for tensor in sent if tensor.numel() > 3]
    assert sum(tensor.numel() for tensor in large) == sum(it.numel() for it in trainer.task.module.parameters())
    assert {tensor.dtype for tensor in large} == {torch.float32}


def test_when_the_leader_fails_its_reason_is_the_last_word(tmp_path):
    settings, inputs = made(tmp_path, steps=100000)
    (tmp_path / "sitecustomize.py").write_text(FULL)
    code, words = ended(start(settings, inputs, tmp_path))
    assert (code, "Traceback" not in words) == (1, True)
    (problem,) = status.read(inputs.run)["problems"]
    assert "state.safetensors was not written" in problem["message"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("if os.environ['RANK'] == '1': sys.exit('no library')", SystemExit),  # the other is ended, and not blamed
        ("os._exit(3)", TrainerError),
    ],
)
def test_processes_that_cannot_start_are_told_from_those_that_cannot_meet(tmp_path, monkeypatch, code, error):
    settings, inputs = made(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\n{code}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "_end", functools.partial(processes._end, patience=0.1))
    with pytest.raises(error, match="cannot reach each other" if error is TrainerError else "1"):
        processes.launch(2, task(settings, inputs), threads=2)


def test_a_process_that_finds_its_port_taken_says_so_without_a_traceback(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        for name, value in (here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit, match="3"):
            processes.Together("cpu", 2)
    PartialState._reset_state()
    assert str(port) in capsys.readouterr().err


def test_a_stop_before_training_began_is_told_as_one(tmp_path, monkeypatch):
    settings, inputs = made(tmp_path)
    monkeypatch.setattr(processes, "_end", functools.partial(processes._end, patience=0.1))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()  # torch is not even loaded
    with pytest.raises(TrainerError, match=r"^stopped before"):
        processes.launch(2, task(settings, inputs), threads=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:1", "processes": 2}, "train.device 'cuda:1' is one device"),
        ({"processes": 3}, "2 GPUs are here"),
        ({"processes": 9, "batch_size": 8, "device": "cpu"}, "each needs a prompt of every batch"),
        ({"processes": 2}, ""),
    ],
)
def test_more_processes_than_devices_or_prompts_are_refused_before_anything_starts(monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if not words:
        return processes.check(Train(**options))
    with pytest.raises(TrainerError, match=words):
        processes.check(Train(**options))
