"""The loss, and the figures of validation and evaluation: one code for both, weighted by row over the whole split."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity

from trainer.adapters.resampler import Resampler
from trainer.batches import Batch, collate
from trainer.packs.base import Metric
from trainer.shards import Shard
from trainer.standardization import Standardization

Predictor = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """Sums over the real rows of a (part of a) batch; divided by the batch's rows they are its loss.

    Sums add up, so that the gradient of a batch in parts is the gradient of the batch.
    """

    objective: torch.Tensor
    squared: torch.Tensor
    cosine: torch.Tensor


def loss(adapter: Resampler, scale: Standardization, batch: Batch, cos_weight: float, metric: Metric) -> Loss:
    """Squared error of standardized rows (mean over dimensions) + cos_weight * (1 - cosine), f32.

    The cosine is that of raw rows for packs that are measured by `cos`, else of standardized ones.
    """
    trunk = adapter(scale.student(batch.student), batch.mask, batch.slots)
    predicted, target = adapter.head(batch.packed(trunk)).float(), scale.target(batch.target)
    squared = (predicted - target).square().mean(-1).sum()
    pair = (scale.raw(predicted), batch.target.float()) if metric == "cos" else (predicted, target)
    cosine = cosine_similarity(*pair, dim=-1).sum()
    return Loss(squared + cos_weight * (len(predicted) - cosine), squared.detach(), cosine.detach())


class Scores:
    """Figures over rows.

    cos: cosine of raw rows. cos_centered: of rows less the mean row. cos_rms: of rows divided by their own root mean
    square. cos_eos: of each sample's last row, where rows are of tokens. worst_row_cos: the lowest of a row, by the
    metric. rel_mse: sum |p - t|^2 / sum |t|^2.
    """

    def __init__(self, mean: torch.Tensor, metric: Metric) -> None:
        """`mean` is the train split's mean teacher row, [D]; `metric` the cosine that samples are compared by."""
        self.mean, self.metric = mean, metric
        self.rows = self.samples = 0
        self.worst = 1.0
        self.by_sample: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, ids: Sequence[str], batch: Batch, predicted: torch.Tensor) -> None:
        """Count a batch; predicted [P, D] raw rows."""
        target = batch.target.float()
        cosines = {
            "cos": cosine_similarity(predicted, target, dim=-1),
            "cos_rms": cosine_similarity(_unit_rms(predicted), _unit_rms(target), dim=-1),
            "cos_centered": cosine_similarity(predicted - self.mean, target - self.mean, dim=-1),
        }
        self.rows += len(target)
        self.samples += len(batch)
        for name, values in cosines.items():
            self._sums[name] += values.double().sum().item()
        self._sums["error"] += (predicted - target).double().square().sum().item()
        self._sums["power"] += target.double().square().sum().item()
        if batch.slots is not None:
            self._sums["cos_eos"] += cosines["cos"][batch.counts.cumsum(0) - 1].double().sum().item()
        cosine = cosines[self.metric].double()
        self.worst = min(self.worst, cosine.min().item())
        means = [part.mean().item() for part in cosine.split(batch.counts.tolist())]
        self.by_sample.update(zip(ids, means, strict=True))

    def metrics(self) -> dict[str, float]:
        """The figures by name."""
        sums = self._sums
        return {
            **{name: sums[name] / self.rows for name in ("cos", "cos_centered", "cos_rms")},
            **({"cos_eos": sums["cos_eos"] / self.samples} if "cos_eos" in sums else {}),
            "worst_row_cos": self.worst,
            "rel_mse": sums["error"] / sums["power"],
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
    predict: Predictor,
    stored: Iterator[tuple[list[str], Batch]],
    mean: torch.Tensor,
    metric: Metric,
) -> Scores:
    """Score raw predictions [P, D] f32 of samples, where the mean row [D] lies, in f32 whatever training uses."""
    scores = Scores(mean, metric)
    for ids, batch in stored:
        batch = batch.to(mean.device)
        scores.add(ids, batch, predict(batch).float())
    return scores


def predictor(adapter: Resampler, scale: Standardization | None) -> Predictor:
    """Raw rows of an adapter: of one in training with its standardization, of an exported one without."""

    def predict(batch: Batch) -> torch.Tensor:
        student = scale.student(batch.student) if scale else batch.student.float()
        rows = adapter.head(batch.packed(adapter(student, batch.mask, batch.slots)))
        return scale.raw(rows) if scale else rows

    return predict
