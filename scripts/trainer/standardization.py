"""Zero mean and unit variance for what goes into and comes out of the adapter, folded away at export.

The adapter trains on (h - m_h) / s_h and predicts (t - m_t) / s_t. Both are affine maps next to a Linear of the
engine's layout, so that they vanish into it exactly:

    in_proj((h - m) / s) = (W / s) h + (b - W (m / s))          out = s (W x + b) + m = (s W) x + (s b + m)

`skip` has one on both sides. Rows of the vision tower are only divided, by their root mean square: `vis_in` has no bias
that could take up a mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from trainer.batches import Batch
from trainer.shards import Shard


@dataclass(frozen=True)
class Standardization:
    """Means and standard deviations, f32: student [student_dim], target [teacher_dim].

    vision_rms: root mean squares [vision_dim], of packs with pictures.
    row_mean, error_std: where rows are raw (`bare`), the mean teacher row and what errors are divided by [teacher_dim].
    """

    student_mean: torch.Tensor
    student_std: torch.Tensor
    target_mean: torch.Tensor
    target_std: torch.Tensor
    vision_rms: torch.Tensor | None = None
    row_mean: torch.Tensor | None = None
    error_std: torch.Tensor | None = None

    @classmethod
    def of(cls, shards: Iterable[Shard], floor: float) -> "Standardization":
        """The moments over all rows of the train shards.

        `floor` keeps the targets' near-constant dimensions (T5-XXL has about 120) from being blown up to noise. What
        the adapter reads has a floor of a hundredth of the median.
        """
        shards = list(shards)

        def moments(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            """Means of the rows and of their squares."""
            count = max(1, sum(shard.size(name)[0] for shard in shards))
            total, squares = (sum(shard.columns[f"{name}_{part}"] for shard in shards) for part in ("sum", "sumsq"))
            return total / count, squares / count

        def floored(values: torch.Tensor) -> torch.Tensor:
            return values.clamp_min(max(1e-6, 0.01 * values.median().item())).float()

        means, deviations = {}, {}
        for name in ("student", "target"):
            means[name], squares = moments(name)
            deviations[name] = (squares - means[name].square()).clamp_min(0).sqrt()
        return cls(
            student_mean=means["student"].float(),
            student_std=floored(deviations["student"]),
            target_mean=means["target"].float(),
            target_std=deviations["target"].clamp_min(floor).float(),
            vision_rms=floored(moments("vision")[1].sqrt()) if "vision" in shards[0] else None,
        )

    def bare(self, targets: bool) -> "Standardization":
        """None of inputs, nor, if `targets`, of targets, whose errors are then divided by their deviations."""
        plain = replace(
            self,
            student_mean=torch.zeros_like(self.student_mean),
            student_std=torch.ones_like(self.student_std),
            vision_rms=None if self.vision_rms is None else torch.ones_like(self.vision_rms),
        )
        if not targets:
            return plain
        kept = {"row_mean": self.target_mean, "error_std": self.target_std}
        zeros, ones = torch.zeros_like(self.target_mean), torch.ones_like(self.target_std)
        return replace(plain, target_mean=zeros, target_std=ones, **kept)

    @property
    def mean(self) -> torch.Tensor:
        """The mean teacher row, [teacher_dim]."""
        return self.target_mean if self.row_mean is None else self.row_mean

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is of the fields, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device) -> "Standardization":
        """A copy on a device."""
        return Standardization(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def inputs(self, batch: Batch) -> Batch:
        """The batch with what the adapter reads standardized, in f32."""
        student = (batch.student.float() - self.student_mean) / self.student_std
        vision = batch.vision if self.vision_rms is None else batch.vision.float() / self.vision_rms
        return replace(batch, student=student, vision=vision)

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        """Standardize teacher rows [..., teacher_dim], to f32."""
        return (rows.float() - self.target_mean) / self.target_std

    def raw(self, predicted: torch.Tensor) -> torch.Tensor:
        """Teacher rows of standardized predictions, f32."""
        return predicted.float() * self.target_std + self.target_mean

    def fold(self, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Weights that map raw states to raw rows, computed in f64."""
        folded = {name: tensor.double().cpu() for name, tensor in weights.items()}
        scale = {name: tensor.double().cpu() for name, tensor in self.tensors().items()}
        shift = scale["student_mean"] / scale["student_std"]
        for name in ("in_proj", "skip"):
            if f"{name}.weight" in folded:
                folded[f"{name}.bias"] = folded[f"{name}.bias"] - folded[f"{name}.weight"] @ shift
                folded[f"{name}.weight"] = folded[f"{name}.weight"] / scale["student_std"]
        for name in ("out_proj", "skip"):
            if f"{name}.weight" in folded:
                folded[f"{name}.bias"] = folded[f"{name}.bias"] * scale["target_std"]
                folded[f"{name}.weight"] = folded[f"{name}.weight"] * scale["target_std"][:, None]
        folded["out_proj.bias"] = folded["out_proj.bias"] + scale["target_mean"]
        if "vis_in.weight" in folded:
            folded["vis_in.weight"] = folded["vis_in.weight"] / scale["vision_rms"]
        return {name: tensor.to(dtype) for name, tensor in folded.items()}
