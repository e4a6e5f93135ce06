"""What training leaves in `checkpoints/`. All safetensors; the metadata key `trainer` is JSON.

state.safetensors        all a resume needs: weights, state of the optimizer, step (and so the position), best so far
best.safetensors         weights (f32) and standardization at the best validation, no optimizer
step-<N>.safetensors     kept steps: the exported tensors themselves, f16 where the GGUF has f16, and mean_row
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer import adapters
from trainer.errors import TrainerError
from trainer.files import written_whole
from trainer.standardization import Standardization

Tensors = dict[str, torch.Tensor]


def save(path: Path, tensors: Tensors, meta: dict[str, Any]) -> None:
    """Write a checkpoint whole; the previous one stays until then."""
    with written_whole(path) as aside:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, aside, metadata={"trainer": json.dumps(meta, sort_keys=True, allow_nan=False)})


def read_meta(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
        TrainerError: it is missing or unreadable.
    """
    try:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["trainer"])
    except FileNotFoundError:
        raise TrainerError(f"checkpoint {path} does not exist") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TrainerError(f"checkpoint {path} is not readable ({error}); delete it to train from the start") from None


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors on the CPU (copies, not views of the file) and metadata."""
    meta = read_meta(path)
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, meta  # noqa: SIM118


class Writer:
    """Does what has to do with files on a thread of its own, one thing after another, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writer")
        self._pending: Future | None = None

    def submit(self, write: Callable[..., Any], *values: Any) -> None:
        """Call `write` soon; waits for the thing before, so that no more than its values and these are in memory.

        Raises:
            TrainerError: the thing before failed.
        """
        self.wait()
        self._pending = self._thread.submit(write, *values)

    def look(self) -> None:
        """Without waiting.

        Raises:
            TrainerError: the thing before failed.
        """
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            TrainerError: that failed.
        """
        pending, self._pending = self._pending, None
        if pending:
            pending.result()


def copies(tensors: Tensors) -> Tensors:
    """Copies on the CPU, which training does not change while they are written."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def pack(weights: Tensors, scale: Standardization) -> Tensors:
    """Weights as `model.*`, standardization as `scale.*`."""
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    return tensors | {f"scale.{name}": tensor for name, tensor in scale.tensors().items()}


def unpack(tensors: Tensors) -> tuple[Tensors, Standardization]:
    """Weights and standardization of a state or best checkpoint."""
    return part(tensors, "model."), Standardization(**part(tensors, "scale."))


def part(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors of a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def exported(weights: Tensors, scale: Standardization) -> Tensors:
    """The tensors of the file: standardization folded in, f16 but for those of `adapters.in_f32`.

    Raises:
        TrainerError: a value does not fit into f16 or is not finite.
    """
    tensors = {}
    for name, tensor in scale.fold(weights).items():
        kept = tensor if adapters.in_f32(name, tensor) else tensor.half()
        if not torch.isfinite(kept).all():
            raise TrainerError(
                f"tensor {name} of the adapter has a value that f16 cannot hold (largest {tensor.abs().max():.3g}); "
                "nothing was written: train with a lower train.lr or a higher train.sigma_floor"
            )
        tensors[name] = kept
    return tensors


def kept(folder: Path) -> list[Path]:
    """Kept steps, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def kept_path(folder: Path, step: int) -> Path:
    """Where a kept step is."""
    return folder / f"step-{step:07d}.safetensors"


def set_aside(folder: Path) -> Path:
    """Move a folder of checkpoints that no longer belongs to this run's inputs out of the way; give its new place."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    place = folder.with_name(f"{folder.name}.stale-{stamp}")
    number = 1
    while place.exists():
        number += 1
        place = folder.with_name(f"{folder.name}.stale-{stamp}-{number}")
    folder.rename(place)
    return place
