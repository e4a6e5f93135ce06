"""What all tests share."""

import os
import signal

import pytest
import tiny_models
import torch
from workflow import end_all

# Tests run beside each other and start processes of their own: more threads would only get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Jobs take the threads that Snakemake gives them: those that wait must leave the cores to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A tiny T5 encoder in two weight files, a tiny Qwen3 student and its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.t5_snapshot(folder / "teacher", dim=64, max_shard_size="5MB")
    tokenizer = tiny_models.qwen2_tokenizer(folder / "tokenizer")
    tiny_models.student_gguf(folder / "pig_clip-f16.gguf")
    return {
        "teacher": str(folder / "teacher"),
        "tokenizer": str(tokenizer),
        "student": str(folder / "pig_clip-f16.gguf"),
    }


@pytest.fixture(scope="module", autouse=True)
def _nothing_goes_on():
    yield
    end_all()


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
