"""Zero mean and unit variance for what goes into and comes out of the adapter, folded away at export.

The adapter trains on (h - m_h) / s_h and predicts (t - m_t) / s_t. Both are affine maps next to a Linear of the
engine's layout, so that they vanish into it exactly:

    in_proj((h - m) / s) = (W / s) h + (b - W (m / s))          out = s (W x + b) + m = (s W) x + (s b + m)
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from trainer.shards import Shard


@dataclass(frozen=True)
class Standardization:
    """Means and standard deviations, f32: student [student_dim], target [teacher_dim]."""

    student_mean: torch.Tensor
    student_std: torch.Tensor
    target_mean: torch.Tensor
    target_std: torch.Tensor

    @classmethod
    def of(cls, shards: Iterable[Shard], floor: float) -> "Standardization":
        """The moments over all rows of the train shards.

        `floor` keeps the targets' near-constant dimensions (T5-XXL has about 120) from being blown up to noise. The
        student's floor is a hundredth of its median deviation.
        """
        sums: dict[str, torch.Tensor | float] = {}
        for shard in shards:
            for name in ("student_sum", "student_sumsq", "target_sum", "target_sumsq"):
                sums[name] = sums.get(name, 0.0) + shard.tensors[name]
            for name in ("rows", "student_rows"):
                sums[name] = sums.get(name, 0) + shard.header[name]

        def moments(name: str, count: float) -> tuple[torch.Tensor, torch.Tensor]:
            mean = sums[f"{name}_sum"] / count
            return mean, (sums[f"{name}_sumsq"] / count - mean.square()).clamp_min(0).sqrt()

        student_mean, student_std = moments("student", sums["student_rows"])
        target_mean, target_std = moments("target", sums["rows"])
        student_std = student_std.clamp_min(max(1e-6, 0.01 * student_std.median().item()))
        return cls(student_mean.float(), student_std.float(), target_mean.float(), target_std.clamp_min(floor).float())

    def to(self, device: torch.device) -> "Standardization":
        """A copy on a device."""
        return Standardization(*(getattr(self, field.name).to(device) for field in fields(self)))

    def student(self, states: torch.Tensor) -> torch.Tensor:
        """Standardize student states [..., student_dim], to f32."""
        return (states.float() - self.student_mean) / self.student_std

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        """Standardize teacher rows [..., teacher_dim], to f32."""
        return (rows.float() - self.target_mean) / self.target_std

    def raw(self, predicted: torch.Tensor) -> torch.Tensor:
        """Teacher rows of standardized predictions, f32."""
        return predicted.float() * self.target_std + self.target_mean

    def fold(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights that map raw states to raw rows, computed in f64, as f32."""
        folded = {name: tensor.double().cpu() for name, tensor in weights.items()}
        scale = 1 / self.student_std.double().cpu()
        shift = self.student_mean.double().cpu() * scale
        folded["in_proj.bias"] = folded["in_proj.bias"] - folded["in_proj.weight"] @ shift
        folded["in_proj.weight"] = folded["in_proj.weight"] * scale
        out = self.target_std.double().cpu()
        folded["out_proj.bias"] = folded["out_proj.bias"] * out + self.target_mean.double().cpu()
        folded["out_proj.weight"] = folded["out_proj.weight"] * out[:, None]
        return {name: tensor.float() for name, tensor in folded.items()}
