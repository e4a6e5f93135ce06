"""How an adapter is trained: the learning rate, the optimizer, and what the network starts from.

`train.recipe: reference` is the recipe of the trainer that published adapters come from, for comparison: raw rows in
and out, seeds at random, decay on everything, a cosine to a tenth of the rate. benchmarks/recipe.md has the figures.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.config import Train
from trainer.packs.base import Metric
from trainer.shards import Shard
from trainer.standardization import Standardization


def learning_rate(step: int, steps: int, settings: Train) -> float:
    """The rate of 0-based `step`: linear warm-up, constant, then linear to 0 over the last `decay_fraction`.

    Only the last part depends on the plan, so that a plan that is raised or lowered while the rate is constant changes
    nothing that was done, and a lowered one still gets its decay.
    """
    if settings.recipe == "reference":
        done = min(1.0, max(0, step - settings.warmup) / max(1, steps - settings.warmup))
        falling = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        return settings.lr * (falling if step >= settings.warmup else (step + 1) / settings.warmup)
    decay = max(1, round(settings.decay_fraction * steps))
    return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup), max(0.0, (steps - step) / decay))


def optimizer(adapter: nn.Module, settings: Train) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms, biases, queries and the seed table do not."""
    decayed, free = [], []
    for name, parameter in adapter.named_parameters():
        matrix = parameter.dim() == 2 and name not in ("query", "t5_embed.weight")
        (decayed if matrix or settings.recipe == "reference" else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def standardization(shards: Sequence[Shard], settings: Train, metric: Metric) -> Standardization:
    """Of inputs and targets; of the reference, of targets only where packs are measured by the centred cosine."""
    scale = Standardization.of(shards, settings.sigma_floor)
    return scale.bare(targets=metric != "cos_centered") if settings.recipe == "reference" else scale


def seeds(table: Tensor, settings: Train) -> Tensor:
    """The seed table [V, W] that training starts from: `table`, the teacher's, or random as in the reference."""
    return torch.randn_like(table) * 0.02 if settings.recipe == "reference" else table
