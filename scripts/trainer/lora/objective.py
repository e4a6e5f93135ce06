"""What a network learns: noise levels, noisy latents, targets, weights and the loss.

Levels u in 0..1 say how much noise, in the order of the model's own schedule; the schedule makes timesteps of them:
that of the scheduler, so that training sees the noise that generating sees. All arithmetic is f32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.lora.families import Timesteps

# The levels that validation measures at.
BANDS = (0.1, 0.3, 0.5, 0.7, 0.9)


def levels(count: int, how: Timesteps, generator: torch.Generator) -> Tensor:
    """Levels of noise to train at, f32 [count], on the CPU.

    `logit_normal` is the sigmoid of a standard normal variable (Esser et al. 2024, arXiv 2403.03206): the middle is
    trained at more than the ends.
    """
    if how == "uniform":
        return torch.rand(count, generator=generator)
    return torch.randn(count, generator=generator).sigmoid()


def loss(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of each item, f32 [B], of predictions and targets [B, C, h, w].

    A mask [B, h, w] of weights >= 0 is scaled to a mean of 1 in each item: the loss is the weighted mean, so that a
    picture whose subject is small counts as much as others do. An item whose mask is all zeros has a loss of 0.
    """
    squared = (prediction.float() - target.float()).square()
    if mask is not None:
        mask = mask.float()[:, None]
        squared = squared * (mask / mask.mean((1, 2, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny))
    return squared.mean((1, 2, 3))


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).view(-1, 1, 1, 1)


class Diffusion:
    """Latents whose variance noise replaces; the network predicts the noise, or the velocity.

    Velocity is sqrt(a) noise - sqrt(1 - a) latents (Salimans and Ho 2022, arXiv 2202.00512), a the share of the
    latents' variance.
    """

    def __init__(self, config: Mapping[str, Any], snr_gamma: float = 0.0) -> None:
        """By the config of a scheduler, of any class that has betas.

        Raises:
            TrainerError: the network predicts latents, or the scheduler has no betas, or min-SNR weights would divide
                by zero.
        """
        from diffusers import DDPMScheduler

        self.prediction = config.get("prediction_type", "epsilon")
        if self.prediction not in ("epsilon", "v_prediction"):
            raise TrainerError(
                f"the base predicts {self.prediction!r} (scheduler_config.json), and epsilon and v_prediction can be "
                "trained: use another base"
            )
        if "beta_schedule" not in config:
            raise TrainerError(
                f"the base's scheduler {config.get('_class_name')} (scheduler_config.json) has no beta_schedule to add "
                "noise by: use another base"
            )
        self.alphas: Tensor = DDPMScheduler.from_config(dict(config)).alphas_cumprod
        self.snr_gamma = snr_gamma
        if snr_gamma and self.prediction == "epsilon" and self.alphas[-1] == 0:
            raise TrainerError(
                "the base predicts noise and its last timestep has no signal (rescale_betas_zero_snr), where min-SNR "
                "weights divide by zero: set lora.snr_gamma to 0"
            )

    def timesteps(self, u: Tensor, size: tuple[int, int]) -> Tensor:
        """Timesteps of levels, whole numbers as f32 [B]; `size` of the latents changes nothing."""
        return (u * len(self.alphas)).floor().clamp(0, len(self.alphas) - 1)

    def noisy(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Latents [B, C, h, w] with noise of as many."""
        a = self._alpha(t, latents)
        return a.sqrt() * latents + (1 - a).sqrt() * noise

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should predict."""
        if self.prediction == "epsilon":
            return noise
        a = self._alpha(t, latents)
        return a.sqrt() * noise - (1 - a).sqrt() * latents

    def weights(self, t: Tensor) -> Tensor:
        """Weight of each item's loss, f32 [B]: min-SNR (Hang et al. 2023, arXiv 2303.09556), or ones."""
        if not self.snr_gamma:
            return torch.ones_like(t)
        a = self.alphas.to(t.device)[t.long()]
        snr = a / (1 - a)
        return snr.clamp_max(self.snr_gamma) / (snr if self.prediction == "epsilon" else snr + 1)

    def _alpha(self, t: Tensor, like: Tensor) -> Tensor:
        return _column(self.alphas.to(t.device)[t.long()], like)


class Flow:
    """Latents that are mixed with noise; the network predicts noise less latents.

    sigma, the share of noise, is a level shifted as the scheduler shifts it when the pipeline generates: by the size
    of the picture, or by a constant. Timesteps are 1000 sigma.
    """

    def __init__(self, config: Mapping[str, Any], flow_shift: float | None = None) -> None:
        """By the config of a FlowMatchEulerDiscreteScheduler; `flow_shift` is a constant in place of its own."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        # Spacings of the steps when generating: they are no shift.
        spacing = dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"), False)
        own = {} if flow_shift is None else {"shift": flow_shift, "use_dynamic_shifting": False}
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config), **spacing, **own)

    def timesteps(self, u: Tensor, size: tuple[int, int]) -> Tensor:
        """Timesteps of levels, f32 [B], for latents of a height and a width."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.scheduler.config
        mu = calculate_shift(
            (size[0] // 2) * (size[1] // 2),
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        # The last sigma of a schedule is what it is stretched by, where a terminal sigma is set.
        last = 1 / config.num_train_timesteps
        self.scheduler.set_timesteps(sigmas=[*u.clamp_min(last).tolist(), last], mu=mu)
        return self.scheduler.timesteps[:-1].to(u.device)

    def noisy(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Latents [B, C, h, w] with noise of as many."""
        sigma = self._sigma(t, latents)
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should predict: the velocity from latents to noise."""
        return noise - latents

    def weights(self, t: Tensor) -> Tensor:
        """Weight of each item's loss, f32 [B]: ones."""
        return torch.ones_like(t)

    def _sigma(self, t: Tensor, like: Tensor) -> Tensor:
        return _column(t / self.scheduler.config.num_train_timesteps, like)
