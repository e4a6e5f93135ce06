"""Running a teacher on one batch."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from trainer.devices import GIB, Budget
from trainer.streaming import Activations, Executor
from trainer.teachers import Teacher


def rows(teacher: Teacher, ids: Tensor, lengths: Tensor, budget: int = GIB) -> Tensor:
    """Rows [B, R, dim] of ids [B, P], with this many bytes of memory."""
    executor = Executor("teacher", teacher.parts, teacher.weights, torch.device("cpu"), Budget(budget, budget))
    with tempfile.TemporaryDirectory() as folder:
        batches = Activations([{"ids": ids, "lengths": lengths}].__getitem__, ["batch"], Path(folder))
        list(executor.run(batches, lambda number, state: state, lambda: False, lambda number: None))
        return batches.state(0)["rows"]
