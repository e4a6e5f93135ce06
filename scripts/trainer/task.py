"""What a run trains, as far as the loop of `trainer.training` knows it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from trainer.checkpoints import Tensors
from trainer.config import Settings


class Batches(Protocol):
    """What gives batches, from a position of the stream of samples on.

    waited: seconds that training has waited for them.
    """

    waited: float

    def __next__(self) -> tuple[Any, int]:
        """This process's share of the next batch, and what the sums of the whole batch are divided by."""

    def close(self) -> None:
        """Stop what makes them."""


class Task(ABC):
    """A network with what it learns from and how it is measured.

    unit: what a sample is called, more than one.
    columns: of metrics.csv while training, as `figures` names them; the first is `loss`.
    val_columns: of metrics.csv at validations: each with the name of its figure in what `validate` gives. By the first
        one, steps are compared.
    higher_is_better: whether the largest of these is the best, or the smallest.
    rungs: steps after which all is measured, whatever the settings say: they are logged, validated and kept.
    closely: how many of the first steps are all logged.
    checks_every_step: stop before the first step whose gradient is not finite, and name its samples; others are only
        looked at before anything is reported or written, which never makes a GPU wait.

    module: parameters of it that require a gradient are trained.
    optimizer: of these parameters. All of its state is saved.
    made_from: what the results depend on; training starts over when it changes.
    compiled: let torch make kernels for the network's blocks. May be set at any time.
    told: what checkpoints tell besides, JSON-able; a resume goes on with it.
    """

    unit: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    val_columns: dict[str, str]
    higher_is_better: ClassVar[bool]
    checks_every_step: ClassVar[bool] = False
    rungs: ClassVar[tuple[int, ...]] = ()
    closely: ClassVar[int] = 0

    module: nn.Module
    optimizer: torch.optim.Optimizer
    made_from: dict[str, Any]
    compiled: bool

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.options, self.device = settings, settings.train, device
        self.told: dict[str, Any] = {}

    # -- a step --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def loader(self, position: int, rank: int, processes: int) -> Batches:
        """Batches from a position of the stream of samples on."""

    def largest(self) -> tuple[Any, int] | None:
        """A batch that needs as much memory as any, to be tried before the first step; None: not worth it."""
        return None

    @abstractmethod
    def parts(self, batch: Any) -> Iterator[Any]:
        """Parts of a batch that go through the network together, on the device."""

    @abstractmethod
    def loss(self, part: Any) -> tuple[Tensor, Tensor]:
        """Sums over a part's samples: the loss, and all that `figures` needs, [N], detached.

        Sums add up, so that the gradient of a batch in parts is the gradient of the batch.
        """

    def figures(self, sums: Tensor, size: int) -> dict[str, Tensor]:
        """What goes into `columns`, of the sums [N] f64 over a whole batch. Called once a step, in every process."""
        return dict(zip(self.columns, sums / size, strict=True))

    @abstractmethod
    def use_less_memory(self, batch: Any) -> None:
        """A batch did not fit: use less memory from now on.

        Raises:
            TrainerError: that is not possible.
        """

    def suspects(self, batch: Any) -> list[tuple[str, str]]:
        """Samples of the last batch, whose gradient was not finite: what they are called, and what is wrong or ''."""
        return []

    # -- validation and checkpoints ------------------------------------------------------------------------------------

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures on the val split; changes nothing that is trained."""

    @abstractmethod
    def weights(self) -> Tensors:
        """What the best checkpoint holds."""

    def state(self) -> Tensors:
        """What is needed to resume, besides `weights` and the state of the optimizer."""
        return {}

    @abstractmethod
    def restore(self, tensors: Tensors) -> None:
        """Go on from `weights` and `state`."""

    @abstractmethod
    def kept(self, tensors: Tensors) -> Tensors:
        """What a kept step holds, made of copies of `weights`. Called on a thread of its own."""
