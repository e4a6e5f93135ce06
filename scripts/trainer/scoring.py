"""The loss, and the figures of validation and evaluation: one code for both, weighted by row over the whole split."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cosine_similarity

from trainer.adapters.resampler import SeededResampler
from trainer.batches import Batch, collate
from trainer.shards import Shard
from trainer.standardization import Standardization


@dataclass(frozen=True)
class Loss:
    """Sums over the real rows of a (part of a) batch; divided by the batch's rows they are its loss.

    Sums add up, so that the gradient of a batch in parts is the gradient of the batch.
    """

    objective: torch.Tensor
    squared: torch.Tensor
    cosine: torch.Tensor


def loss(adapter: SeededResampler, scale: Standardization, batch: Batch, cos_weight: float) -> Loss:
    """Squared error of standardized rows (mean over dimensions) + cos_weight * (1 - cosine of raw rows), f32."""
    trunk = adapter(scale.student(batch.student), batch.mask, batch.slots)
    predicted = adapter.head(trunk[batch.real]).float()
    squared = (predicted - scale.target(batch.target)).square().mean(-1).sum()
    cosine = cosine_similarity(scale.raw(predicted), batch.target.float(), dim=-1).sum()
    return Loss(squared + cos_weight * (len(predicted) - cosine), squared.detach(), cosine.detach())


@dataclass
class Scores:
    """Figures over rows; `rel_mse` is sum |p - t|^2 / sum |t|^2."""

    rows: int = 0
    cosine: float = 0.0
    cosine_rms: float = 0.0
    cosine_end: float = 0.0
    samples: int = 0
    error: float = 0.0
    power: float = 0.0
    worst: float = 1.0
    by_sample: dict[str, float] = field(default_factory=dict)

    def add(self, ids: Sequence[str], batch: Batch, predicted: torch.Tensor) -> None:
        """Count a batch; predicted [P, D] raw rows."""
        target = batch.target.float()
        cosine = cosine_similarity(predicted, target, dim=-1).double()
        lengths = batch.real.sum(1)
        ends = lengths.cumsum(0)
        self.rows += len(target)
        self.samples += len(batch)
        self.cosine += cosine.sum().item()
        self.cosine_rms += cosine_similarity(_unit_rms(predicted), _unit_rms(target), dim=-1).double().sum().item()
        self.cosine_end += cosine[ends - 1].sum().item()
        self.error += (predicted - target).double().square().sum().item()
        self.power += target.double().square().sum().item()
        self.worst = min(self.worst, cosine.min().item())
        means = [part.mean().item() for part in cosine.split(lengths.tolist())]
        self.by_sample.update(zip(ids, means, strict=True))

    def metrics(self) -> dict[str, float]:
        """The figures by name."""
        return {
            "cos": self.cosine / self.rows,
            "cos_rms": self.cosine_rms / self.rows,
            "cos_eos": self.cosine_end / self.samples,
            "worst_row_cos": self.worst,
            "rel_mse": self.error / self.power,
        }


def _unit_rms(rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def batches(shards: Sequence[Shard], size: int, queries: int) -> Iterator[tuple[list[str], Batch]]:
    """All samples in stored order, with their ids."""
    picks = [(shard, sample) for shard in shards for sample in range(len(shard))]
    for start in range(0, len(picks), size):
        part = picks[start : start + size]
        yield [shard.header["ids"][sample] for shard, sample in part], collate(part, queries)


@torch.inference_mode()
def score(
    predict: Callable[[Batch], torch.Tensor], shards: Sequence[Shard], size: int, queries: int, device: torch.device
) -> Scores:
    """Score raw predictions [P, D] f32 of every sample of some shards, in f32 whatever training uses."""
    scores = Scores()
    for ids, batch in batches(shards, size, queries):
        batch = batch.to(device)
        scores.add(ids, batch, predict(batch).float())
    return scores


def predictor(adapter: SeededResampler, scale: Standardization | None) -> Callable[[Batch], torch.Tensor]:
    """Raw rows of an adapter: of one in training with its standardization, of an exported one without."""

    def predict(batch: Batch) -> torch.Tensor:
        student = scale.student(batch.student) if scale else batch.student.float()
        rows = adapter.head(adapter(student, batch.mask, batch.slots)[batch.real])
        return scale.raw(rows) if scale else rows

    return predict
