"""Requests to stop: what is not finished is saved or discarded, whichever was asked for first."""

import os
import signal
import subprocess
import sys

import pytest
import tiny_runs
from trainer import control, training
from trainer.adapter_task import AdapterTask
from trainer.errors import StoppedError, TrainerError
from workflow import CHECKOUT


@pytest.fixture
def requests(tmp_path):
    before = {it: signal.getsignal(it) for it in (signal.SIGINT, signal.SIGTERM, control.LIMIT_AHEAD)}
    yield control.Requests(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("discard", [False, True])
def test_a_request_says_what_becomes_of_what_is_not_finished(tmp_path, requests, discard):
    assert (requests.stop(), requests.discard()) == (False, False)
    assert control.request_stop(tmp_path, discard=discard) == []
    assert (requests.stop(), requests.discard()) == (True, discard)
    control.clear_stop(tmp_path)
    assert (requests.stop(), requests.discard()) == (False, False)


@pytest.mark.parametrize("first", [False, True])
def test_the_first_request_counts_and_the_second_is_told_so(tmp_path, requests, first):
    control.request_stop(tmp_path, discard=first)
    stands = "asked to discard what is not finished and stop" if first else "asked to save and stop"
    with control.only_one(tmp_path, "train"), pytest.raises(TrainerError, match=stands):
        control.request_stop(tmp_path, discard=not first)
    assert requests.discard() is first


def test_a_signal_saves_whatever_else_was_asked(tmp_path, requests):
    control.request_stop(tmp_path, discard=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (requests.stop(), requests.discard()) == (True, False)


@pytest.mark.parametrize("discard", [False, True])
def test_only_a_stop_that_discards_throws_away_and_an_error_never_does(tmp_path, requests, discard):
    control.request_stop(tmp_path, discard=discard)
    thrown = []
    words = "is thrown away; the same command begins it anew" if discard else "saved"
    with pytest.raises(StoppedError, match=words), control.discarding(requests, lambda: thrown.append(1)):
        raise StoppedError("saved")
    assert len(thrown) == discard
    with pytest.raises(TrainerError, match="disk"), control.discarding(requests, lambda: thrown.append(1)):
        raise TrainerError("the disk is full")
    assert len(thrown) == discard


def test_a_training_that_has_ended_is_not_discarded(tmp_path, requests):
    settings = tiny_runs.settings(tmp_path, steps=20)
    run = tiny_runs.make(settings).run

    def train(stop_at, steps=20):
        def plan(steps_now):
            if (run / "checkpoints").exists() and seen.append(1) is None and len(seen) == stop_at:
                control.request_stop(run, discard=True)
            return steps

        seen = []
        settings.train.steps, settings.train.log_every, settings.train.save_every = steps, 1, 1
        asked = control.Requests(run)
        with control.discarding(asked, lambda: training.discard(run)):
            training.train(settings, AdapterTask, plan, asked, run / "trained.safetensors")

    with pytest.raises(StoppedError, match="thrown away"):
        train(stop_at=5)
    assert not [it.name for it in run.iterdir() if it.name in ("checkpoints", "metrics.csv", "tensorboard")]
    assert (run / "shards.json").exists()
    control.clear_stop(run)
    train(stop_at=0)
    ended = (run / "checkpoints" / "state.safetensors").read_bytes()
    training.discard(run)
    assert (run / "checkpoints" / "state.safetensors").read_bytes() == ended
    with pytest.raises(StoppedError, match="thrown away"):  # on the way from there to a later end
        train(stop_at=3, steps=60)
    assert not (run / "checkpoints").exists()
    assert (run / "trained.safetensors").exists()


def test_the_help_says_what_goes_and_what_stays():
    command = [sys.executable, str(CHECKOUT / "scripts" / "control.py")]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    for word in ("checkpoints", "metrics.csv", "tensorboard", "not whole", "Everything that is finished stays"):
        assert word in told
    refused = subprocess.run([*command, ".", "running", "--discard"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--discard goes with stop" in refused.stderr
