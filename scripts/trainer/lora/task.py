"""Training a LoRA: what a diffusion model's network adds to noisy latents of the pictures, given their captions."""

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from trainer import checkpoints, packs
from trainer.checkpoints import Tensors
from trainer.config import Settings, stage_settings
from trainer.errors import TrainerError
from trainer.files import read_json
from trainer.job import log
from trainer.lora import corpus, draws, evaluation, families, models, network, objective
from trainer.lora.batches import Batch, Items, Loader, Part
from trainer.materials import parts_digest, read_record
from trainer.shard_index import listed, trained_on
from trainer.task import Task

_BANDS = [f"loss_{level}" for level in objective.BANDS]
# Of one step in the running means of the bands' losses.
_SHARE = 0.02
# What gradients are multiplied by inside a base in f16, whose smallest numbers they would fall below.
_F16_SCALE = 2.0**14


class LoraTask(Task):
    """A LoRA on a frozen base, and the pictures of a run's shards.

    numbers: that the base is kept in.
    averaged: where `lora.ema` asks for them, the running means of the weights: they are what is validated and exported.
    """

    unit = "pictures"
    columns = ("loss", *_BANDS)
    val_columns = {"val_loss": "loss"} | {f"val_{band}": band for band in _BANDS}
    higher_is_better = False
    checks_every_step = True
    rungs = families.RUNGS
    closely = families.RUNGS[1]

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """A fresh LoRA.

        Raises:
            TrainerError: a split has no pictures, or the base cannot be loaded as the settings say.
        """
        super().__init__(settings, device)
        run, options, self.family = Path(settings.folder), settings.lora, families.get(packs.get(settings.pack).family)
        base = read_record(run / "materials" / "base.json")
        index = read_json(run / "shards.json")
        self.train, self.val = (self._items(run, index, split) for split in ("train", "val"))
        self.model = models.get(self.family.name)(Path(base.path))
        shift = options.flow_shift if isinstance(options.flow_shift, float) else None
        self.schedule = self.model.noise_schedule(flow_shift=shift, snr_gamma=options.snr_gamma)
        self.numbers = network.precision(self.model, options, device)
        log.info("the base is kept in %s", self.numbers)
        self.made_from = {
            **stage_settings(settings, "train")["train"],
            "shards": trained_on(index),
            "base": parts_digest(base, (self.family.part, "scheduler")),
            "base_precision": self.numbers,
        }
        self.module = network.load(self.model, options, self.numbers, device, self.options.seed)
        self.module.train()
        self.weight = network.parameters(self.module)
        self.optimizer = _optimizer(list(self.weight.values()), settings)
        self.optimizer.register_step_pre_hook(self._look)
        self.optimizer.register_step_post_hook(self._average)
        self.averaged = {name: it.detach().clone() for name, it in self.weight.items()} if options.ema else None
        self.updates = torch.tensor(0)
        self.bands = torch.zeros(2, len(_BANDS), dtype=torch.float64, device=device)
        self.places = self.options.batch_tokens or sys.maxsize
        self.untrained: dict[str, float] | None = None
        self.told["attention"] = evaluation.attention(self.module)
        if self.numbers == "f16":
            for parameter in self.weight.values():
                parameter.register_hook(lambda gradient: gradient / _F16_SCALE)

    def _items(self, run: Path, index: dict[str, Any], split: str) -> Items:
        rows = list(corpus.read(run / "corpus" / f"{split}.jsonl"))
        items = Items(rows, listed(run, index, split), listed(run, index, "text"))
        if not len(items):
            raise TrainerError(
                f"the shards of {run} hold no pictures of the split {split}; see corpus.json and the logs"
            )
        return items

    @property
    def compiled(self) -> bool:
        """Whether torch makes kernels for the blocks of the base."""
        return self._compiled

    @compiled.setter
    def compiled(self, value: bool) -> None:
        if value and self.numbers == "nf4":
            log.info("train.compile: kernels are made for dense bases only; going on without")
        self._compiled = value and self.numbers != "nf4"
        network.use_compiled(self.module, self._compiled)

    # -- a step --------------------------------------------------------------------------------------------------------

    def loader(self, position: int, rank: int = 0, processes: int = 1) -> Loader:
        """Batches; their sums are divided by their pictures."""
        return Loader(
            self.train,
            seed=self.options.seed,
            dropout=self.settings.lora.text_dropout,
            position=position,
            size=self.options.batch_size,
            pin=self.device.type == "cuda",
            rank=rank,
            processes=processes,
        )

    def largest(self) -> tuple[Batch, int]:
        """As many pictures of the largest bucket as a process has of a batch."""
        count = -(-self.options.batch_size // self.options.processes)
        return self.train.largest(count), count

    def parts(self, batch: Batch) -> Iterator[Part]:
        """Parts of one bucket, of `places` of latents at most."""
        self.seen: list[tuple[Part, Tensor]] = []
        for some in batch.split(self.places):
            yield some.to(self.device)

    def loss(self, part: Part) -> tuple[Tensor, Tensor]:
        """Sums over pictures: the weighted loss, and [11]: the same, and of each band the losses and their count."""
        seed, lora = self.options.seed, self.settings.lora
        drawn = [draws.at(seed, "timestep", at).integers(2**63) for at in part.positions]
        u = torch.cat([objective.levels(1, lora.timesteps, torch.Generator().manual_seed(int(it))) for it in drawn])
        noise = _noise(seed, "noise", part.positions, part.latents)
        # The one thing that is drawn from torch's own generator: which inputs of the LoRA are left out.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], enabled=lora.dropout > 0):
            if lora.dropout:
                torch.manual_seed(int(draws.at(seed, "dropout", part.positions[0]).integers(2**63)))
            prediction, target, t = self._predicted(part, u, noise)
        if self.numbers == "f16":
            prediction.register_hook(lambda gradient: gradient * _F16_SCALE)
        losses = objective.loss(prediction, target, part.mask)
        self.seen.append((part, losses.detach()))
        weighted = (losses * self.schedule.weights(t) * part.weights).sum()
        bands = one_hot((u * len(_BANDS)).long().clamp_max(len(_BANDS) - 1), len(_BANDS)).to(losses)
        of_bands = torch.cat([losses.detach() @ bands, bands.sum(0)])
        return weighted, torch.cat([weighted.detach()[None], of_bands])

    def _predicted(self, part: Part, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the network says at levels [B] of noise, what it should say, and the timesteps."""
        t = self.schedule.timesteps(u, tuple(part.latents.shape[2:])).to(part.latents.device)
        prediction = self.model.predict(
            self.module,
            self.schedule.noisy(part.latents, noise, t),
            t,
            part.conditions,
            part.time_ids,
            self.settings.lora.guidance,
        )
        return prediction, self.schedule.target(part.latents, noise, t), t

    def figures(self, sums: Tensor, size: int) -> dict[str, Tensor]:
        """The step's mean loss, and running means of the losses at the levels of each band, unweighted."""
        self.bands = (1 - _SHARE) * self.bands + _SHARE * sums[1:].view(2, -1)
        return {"loss": sums[0] / size} | dict(zip(_BANDS, self.bands[0] / self.bands[1], strict=True))

    def use_less_memory(self, batch: Batch) -> None:
        """Smaller parts, then blocks computed again in the backward pass."""
        if len(batch) > 1 and self.places > batch.largest:
            self.places = max(batch.largest, min(self.places, len(batch) * batch.largest) // 2)
            log.info("out of memory: going on with %d places of latents a forward pass", self.places)
        elif not self.module.is_gradient_checkpointing:
            self.module.enable_gradient_checkpointing()
            log.info("out of memory with one picture at a time: going on with blocks computed twice")
        else:
            raise TrainerError(
                f"out of memory on {self.device} with one picture at a time: lower pictures.resolution, or set "
                "lora.base_precision to nf4 or lora.offload to true"
            ) from None

    def suspects(self, batch: Batch) -> list[tuple[str, str]]:
        """Files of the pictures, and of each whether its latents or its loss are not finite."""
        found = []
        for some, losses in self.seen:
            for file, latents, loss in zip(some.files, some.latents, losses.tolist(), strict=True):
                wrong = "" if math.isfinite(loss) else f"its loss is {loss}"
                found.append((file, wrong if torch.isfinite(latents).all() else "its latents are not finite"))
        return found

    def _look(self, *_: Any) -> None:
        """Before the first step of the optimizer: note which weights have gradients."""
        if "gradients" not in self.told:
            self.told["gradients"] = asdict(evaluation.gradients(self.module))

    def _average(self, *_: Any) -> None:
        """After a step of the optimizer: move the running means, at first faster than `lora.ema` says."""
        if self.averaged is not None:
            count = int(self.updates)
            decay = min(self.settings.lora.ema, (1 + count) / (10 + count))
            weights = [it.detach() for it in self.weight.values()]
            torch._foreach_lerp_(list(self.averaged.values()), weights, 1 - decay)
            self.updates += 1

    # -- validation and checkpoints ------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Mean losses on the val split, at all levels of noise and at each; as `base_*`, those without the LoRA.

        Noise, latents (means) and captions are the same each time.
        """
        self.module.eval()
        if self.untrained is None:
            self.module.disable_adapters()
            self.untrained = {f"base_{name}": value for name, value in self._losses().items()}
            self.module.enable_adapters()
        trained = {name: it.detach().clone() for name, it in self.weight.items()} if self.averaged else None
        self._put(self.averaged or {})
        found = self._losses()
        self._put(trained or {})
        self.module.train()
        return found | self.untrained

    @torch.no_grad()
    def _losses(self) -> dict[str, float]:
        sums = torch.zeros(len(_BANDS), dtype=torch.float64)
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            for number in range(len(self.val)):
                (some,) = self.val.validated([number]).to(self.device).parts
                noise = _noise(self.options.seed, f"validation {some.ids[0]}", (0,), some.latents)
                for band, level in enumerate(objective.BANDS):
                    prediction, target, _ = self._predicted(some, torch.tensor([level]), noise)
                    sums[band] += objective.loss(prediction, target, some.mask).item()
        means = (sums / len(self.val)).tolist()
        return {"loss": sum(means) / len(means)} | dict(zip(_BANDS, means, strict=True))

    @torch.no_grad()
    def _put(self, weights: Tensors) -> None:
        for name, tensor in weights.items():
            self.weight[name].copy_(tensor)

    def weights(self) -> Tensors:
        """The LoRA, or its running mean: `model.<module>.lora_A.weight` and `.lora_B.weight`, f32."""
        return {f"model.{name}": it for name, it in (self.averaged or self.weight).items()}

    def state(self) -> Tensors:
        """The weights themselves where means are exported, and what running means are of."""
        trained = self.weight if self.averaged else {}
        return {f"trained.{name}": it for name, it in trained.items()} | {"updates": self.updates, "bands": self.bands}

    def restore(self, tensors: Tensors) -> None:
        """Go on from weights and running means."""
        weights = checkpoints.part(tensors, "model.")
        self._put(checkpoints.part(tensors, "trained.") or weights)
        if self.averaged:
            self.averaged = {name: weights[name].to(self.device) for name in self.averaged}
        self.updates, self.bands = tensors["updates"], tensors["bands"].to(self.device)

    def kept(self, tensors: Tensors) -> Tensors:
        """The same as the best checkpoint holds."""
        return tensors


def _noise(seed: int, stream: str, positions: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal noise, f32 [B, C, h, w], that is the same for the same positions of a stream."""
    shape = tuple(like.shape[1:])
    drawn = [torch.from_numpy(draws.at(seed, stream, at).standard_normal(shape, dtype="float32")) for at in positions]
    return torch.stack(drawn).to(like.device)


def _optimizer(parameters: list[torch.nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of `lora.optimizer`.

    Raises:
        TrainerError: its package is not here.
    """
    train, name = settings.train, settings.lora.optimizer
    shared = {"lr": train.lr, "betas": (0.9, 0.999), "weight_decay": train.weight_decay}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **shared, fused=True)
    package = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}[name]
    try:
        if name == "adamw8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(parameters, **shared)
        from prodigyopt import Prodigy

        return Prodigy(parameters, **shared)
    except ImportError:
        raise TrainerError(
            f"lora.optimizer {name} takes the package {package}: `pip install {package}`, or set it to adamw"
        ) from None
