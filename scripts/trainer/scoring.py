"""The loss, and the figures of validation and evaluation: one code for both, weighted by row over the whole split."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from trainer.adapters import Adapter
from trainer.batches import Batch
from trainer.packs.base import Metric
from trainer.samples import Samples
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


def loss(adapter: Adapter, scale: Standardization, batch: Batch, cos_weight: float, metric: Metric) -> Loss:
    """Squared error of standardized rows (mean over dimensions) + cos_weight * (1 - cosine), f32.

    The cosine is that of raw rows, for packs that are measured by `cos_centered` of standardized ones.
    """
    predicted, target = adapter(scale.inputs(batch)).float(), scale.target(batch.target)
    errors = predicted - target if scale.error_std is None else (predicted - target) / scale.error_std
    squared = errors.square().mean(-1).sum()
    pair = (predicted, target) if metric == "cos_centered" else (scale.raw(predicted), batch.target.float())
    cosine = cosine_similarity(*pair, dim=-1).sum()
    return Loss(squared + cos_weight * (len(predicted) - cosine), squared.detach(), cosine.detach())


class Scores:
    """Figures over rows, and over samples.

    cos: cosine of raw rows. cos_centered: of rows less the mean row. cos_rms: of rows divided by their own root mean
    square. rel_mse: sum |p - t|^2 / sum |t|^2. worst_row_cos: the lowest of a row that is read, by the metric.

    Where slots are seeded, cos_eos: of each sample's last row. Of token-aligned packs, cos_slice: the mean over samples
    of the mean `cos` of their rows that the DiT reads; cos_edit, cos_t2i: of samples with and without pictures; and
    cos_vis, cos_txt: `cos` of rows under pictures and of others, where the former are learnt too.
    """

    def __init__(self, mean: torch.Tensor, metric: Metric) -> None:
        """`mean` is the train split's mean teacher row, [D]; `metric` the cosine that samples are compared by."""
        self.mean, self.metric = mean, metric
        self.rows = self.samples = 0
        self.worst = 1.0
        self.by_sample: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, ids: Sequence[str], batch: Batch, predicted: torch.Tensor) -> None:
        """Count a batch; predicted [R, D] raw rows."""
        target = batch.target.float()
        cosines = {
            "cos": cosine_similarity(predicted, target, dim=-1),
            "cos_rms": cosine_similarity(_unit_rms(predicted), _unit_rms(target), dim=-1),
            "cos_centered": cosine_similarity(predicted - self.mean, target - self.mean, dim=-1),
        }
        self.rows += len(target)
        self.samples += len(batch)
        for name, values in cosines.items():
            self._count(name, values)
        self._sums["error"] += (predicted - target).double().square().sum().item()
        self._sums["power"] += target.double().square().sum().item()
        if batch.slots is not None:
            self._count("cos_eos", cosines["cos"][torch.tensor(batch.counts).cumsum(0) - 1])
        cosine = cosines["cos_centered" if self.metric == "cos_centered" else "cos"].double()
        read = torch.ones_like(cosine, dtype=torch.bool) if batch.read is None else batch.read
        self.worst = min(self.worst, cosine[read].min().item())
        parts = zip(cosine.split(batch.counts), read.split(batch.counts), strict=True)
        means = torch.stack([part[wanted].mean() for part, wanted in parts])
        self.by_sample.update(zip(ids, means.tolist(), strict=True))
        if batch.read is not None:
            edits = torch.tensor(batch.seen, device=means.device) > 0
            self._count("cos_slice", means)
            self._count("cos_edit", means[edits])
            self._count("cos_t2i", means[~edits])
        if batch.vision is not None:
            pictured = torch.zeros(len(batch.student), 1, dtype=torch.bool, device=target.device)
            pictured[batch.vision_at] = True
            under = batch.wanted(pictured)[:, 0]
            self._count("cos_vis", cosine[under])
            self._count("cos_txt", cosine[~under])

    def _count(self, name: str, values: torch.Tensor) -> None:
        self._sums[name] += values.double().sum().item()
        self._counts[name] += len(values)

    def metrics(self) -> dict[str, float]:
        """The figures by name, those that there is something for."""
        found = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        if "cos_vis" not in found:
            found.pop("cos_txt", None)  # it is `cos`
        return found | {"worst_row_cos": self.worst, "rel_mse": self._sums["error"] / self._sums["power"]}


def _unit_rms(rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def batches(
    shards: Sequence[Shard], size: int, queries: int | None, only: Container[str] | None = None
) -> Iterator[tuple[list[str], Batch]]:
    """All samples in stored order, or those of the ids `only`, with their ids."""
    for shard in shards:
        for chunk, (first, end) in enumerate(pairwise(shard.chunks)):
            ids = shard.header["ids"][first:end]
            wanted = [number for number, id in enumerate(ids) if only is None or id in only]
            samples = Samples.read([(shard, chunk)])
            for start in range(0, len(wanted), size):
                part = wanted[start : start + size]
                yield [ids[number] for number in part], samples.take(np.array(part)).batch(queries)


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


def predictor(adapter: Adapter, scale: Standardization | None) -> Predictor:
    """Raw rows of an adapter: of one in training with its standardization, of an exported one without."""

    def predict(batch: Batch) -> torch.Tensor:
        if scale is None:
            return adapter(batch.widened())
        return scale.raw(adapter(scale.inputs(batch)))

    return predict
