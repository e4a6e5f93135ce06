"""The training loop: resumes to the byte, follows the plan while it runs, stops when asked, keeps the best."""

import csv
import io
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter

from trainer import adapters, checkpoints, devices, packs, scoring
from trainer.batches import Batch, Loader, Order
from trainer.config import Settings, Train, write_stage_settings
from trainer.control import Requests
from trainer.errors import StoppedError, TrainerError
from trainer.files import digest, read_json, write_if_changed, write_text, written_whole
from trainer.job import announce, duration, log
from trainer.shard_index import listed
from trainer.shards import Shard, to_rebuild
from trainer.standardization import Standardization

COLUMNS = ["step", "time", "loss", "mse", "cos", "lr", "grad_norm", "prompts_per_s", "val_cos", "val_rel_mse"]

# Weights that come from a file: which of the adapter's, and which of the file's.
_GIVEN = {"seed_table": ("t5_embed.weight", "table"), "vision_proj": ("vision_proj.weight", "weight")}


def learning_rate(step: int, steps: int, settings: Train) -> float:
    """The rate of 0-based `step`: linear warm-up, constant, then linear to 0 over the last `decay_fraction`.

    Only the last part depends on the plan, so that a plan that is raised or lowered while the rate is constant changes
    nothing that was done, and a lowered one still gets its decay.
    """
    decay = max(1, round(settings.decay_fraction * steps))
    return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup), max(0.0, (steps - step) / decay))


@dataclass
class Inputs:
    """What training reads: shards.json, the shards it lists, and files of weights that it does not start at random."""

    run: Path
    index: dict[str, Any]
    train: list[Path]
    val: list[Path]
    given: dict[str, Path]

    @classmethod
    def read(cls, settings: Settings) -> "Inputs":
        """The inputs of a run."""
        run, shape = Path(settings.folder), settings.adapter
        index = read_json(run / "shards.json")
        train, val = (listed(run, index, split) for split in ("train", "val"))
        wanted = {"seed_table": shape.vocabulary, "vision_proj": shape.vision_dim}
        given = {name: run / "shards" / f"{name}.safetensors" for name, size in wanted.items() if size}
        return cls(run, index, train, val, given)


class Trainer:
    """One training run, from the state on disk (if it belongs to these inputs) to the planned step."""

    def __init__(self, settings: Settings, inputs: Inputs, plan: Callable[[int], int]) -> None:
        """`plan` gives the planned steps as the user's files say now, from those in force."""
        # Before CUDA starts: without it, matrix products on a GPU differ from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        self.settings, self.options, self.inputs, self.plan = settings, settings.train, inputs, plan
        self.steps = settings.train.steps
        self.device = devices.pick(settings.train.device)
        self.autocast = devices.multiplies_bf16(self.device)
        self.folder = inputs.run / "checkpoints"
        self.metrics_file = inputs.run / "metrics.csv"
        self.queries = settings.adapter.queries
        self.metric = packs.get(settings.pack).metric
        self.micro_batch = self.options.micro_batch or self.options.batch_size
        self.made_from = {
            "adapter": settings.adapter.fingerprint(),
            "train": settings.train.fingerprint(),
            "shards": digest(inputs.index),
        }
        self.made_from |= {name: digest(checkpoints.read_meta(path)) for name, path in inputs.given.items()}
        self.val = self._open_val()
        self._start()
        self._resume()

    def _open_val(self) -> list[Shard]:
        shards = [Shard(path) for path in self.inputs.val]
        for shard in shards:
            if shard.damaged():
                raise to_rebuild(shard.path, "damaged")
        if not self.inputs.index["train"]["samples"] or not self.inputs.index["val"]["samples"]:
            raise TrainerError(f"the shards of {self.inputs.run} hold no samples; see corpus.json and the logs")
        return shards

    def _start(self) -> None:
        """A fresh adapter at step 0."""
        torch.manual_seed(self.options.seed)
        adapter = adapters.fresh(self.settings.adapter)
        for name, path in self.inputs.given.items():
            mine, stored = _GIVEN[name]
            adapter.state_dict()[mine].copy_(load_file(path)[stored])
        self.adapter = adapter.to(self.device)
        self.scale = Standardization.of(map(Shard, self.inputs.train), self.options.sigma_floor).to(self.device)
        self.optimizer = self._optimizer()
        self.step = 0
        self.best_cos: float | None = None
        self.last_val: dict[str, float] | None = None

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW; matrices decay, norms, biases, queries and the seed table do not."""
        decayed, free = [], []
        for name, parameter in self.adapter.named_parameters():
            matrix = parameter.dim() == 2 and name not in ("query", "t5_embed.weight")
            (decayed if matrix else free).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.options.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.options.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = self.folder / "state.safetensors"
        self.records: list[dict[str, Any]] = []
        if path.exists():
            tensors, meta = checkpoints.load(path)
            if meta["made_from"] == self.made_from:
                self._restore(tensors, meta)
                log.info("resuming at step %d of %d", self.step, self.steps)
                return
            place = checkpoints.set_aside(self.folder)
            log.info(
                "the checkpoints were trained with other inputs (%s): moved to %s, training starts over",
                ", ".join(_differences(meta["made_from"], self.made_from)),
                place,
            )
        log.info("training from the start to step %d", self.steps)

    def _restore(self, tensors: checkpoints.Tensors, meta: dict[str, Any]) -> None:
        weights, scale = checkpoints.unpack(tensors)
        self.adapter.load_state_dict(weights)
        self.scale = scale.to(self.device)
        self.step, self.best_cos, self.last_val = meta["step"], meta["best_cos"], meta["last_val"]
        for name, parameter in self.adapter.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=self.device),
                "exp_avg": tensors[f"exp_avg.{name}"].to(self.device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(self.device),
            }
        torch.set_rng_state(tensors["rng"])
        if self.metrics_file.exists():
            rows = csv.DictReader(io.StringIO(self.metrics_file.read_text()))
            self.records = [row for row in rows if row["step"].isdigit() and int(row["step"]) <= self.step]

    def _meta(self, **more: Any) -> dict[str, Any]:
        return {
            "step": self.step,
            "steps": self.steps,
            "best_cos": self.best_cos,
            "last_val": self.last_val,
            "made_from": self.made_from,
        } | more

    def save(self) -> None:
        """Save the state; the previous one stays until the new one is whole."""
        tensors = checkpoints.pack(self.adapter, self.scale) | {"rng": torch.get_rng_state()}
        for name, parameter in self.adapter.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        self._write_metrics()
        checkpoints.save(self.folder / "state.safetensors", tensors, self._meta())

    def keep(self, val: dict[str, float] | None) -> None:
        """Keep this step for export at any later time."""
        exported = checkpoints.exported(*checkpoints.unpack(checkpoints.pack(self.adapter, self.scale)))
        path = checkpoints.kept_path(self.folder, self.step)
        checkpoints.save(path, exported | {"scale.target_mean": self.scale.target_mean}, self._meta(val=val))
        if self.options.keep_last:
            for old in checkpoints.kept(self.folder)[: -self.options.keep_last]:
                old.unlink()

    # -- figures -------------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Score the current weights on the val split."""
        self.adapter.eval()
        predict = scoring.predictor(self.adapter, self.scale)
        val = scoring.batches(self.val, self.options.batch_size, self.queries)
        metrics = scoring.score(predict, val, self.scale.target_mean, self.metric).metrics()
        self.adapter.train()
        log.info("step %d: val cosine %.4f, rel_mse %.4f", self.step, metrics[self.metric], metrics["rel_mse"])
        return metrics

    def _validate_and_keep_best(self) -> None:
        self.last_val = metrics = self.validate()
        cosine = metrics[self.metric]
        self._record(val_cos=cosine, val_rel_mse=metrics["rel_mse"])
        if self.best_cos is None or cosine > self.best_cos:
            self.best_cos = cosine
            path = self.folder / "best.safetensors"
            checkpoints.save(path, checkpoints.pack(self.adapter, self.scale), self._meta(val=metrics))

    def _validated(self) -> bool:
        """Whether the current step was validated."""
        last = self.records[-1] if self.records else {"step": -1}
        return int(last["step"]) == self.step and bool(last.get("val_cos"))

    def _record(self, **values: float) -> None:
        if not self.records or int(self.records[-1]["step"]) != self.step:
            self.records.append({"step": self.step, "time": f"{time.time():.1f}"})
        self.records[-1] |= {name: f"{value:.6g}" for name, value in values.items()}
        for name, value in values.items():
            self.events.add_scalar(name, value, self.step)
        announce(metrics=[row for name in ("loss", "val_cos") if (row := self._newest(name))])

    def _newest(self, column: str) -> dict[str, Any] | None:
        return next((row for row in reversed(self.records) if row.get(column)), None)

    def _write_metrics(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        write_text(self.metrics_file, text.getvalue())

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, requests: Requests) -> None:
        """Train to the planned step.

        Raises:
            StoppedError: asked to; the state is saved.
            TrainerError: the loss is not finite, a shard is damaged, the disk is full.
        """
        self.events = SummaryWriter(self.inputs.run / "tensorboard", purge_step=self.step + 1)
        counts = [shard["samples"] for shard in self.inputs.index["train"]["shards"]]
        order = Order(counts, self.options.seed, self.options.shuffle_shards)
        position = self.step * self.options.batch_size
        loader = Loader(
            *(self.inputs.train, order, position, self.options.batch_size, self.queries),
            pin=self.device.type == "cuda",
        )
        try:
            self._follow(loader, requests)
        finally:
            loader.close()
            self.events.close()

    def _follow(self, loader: Loader, requests: Requests) -> None:
        start, done, since = time.monotonic(), self.step, time.monotonic()
        first = self.step
        while self.step < self.steps:
            # With validations and saves, for the time that is left; the log tells the rate without them.
            pace = (self.step - first) / max(_since(start), 1e-9)
            announce(what="training", done=self.step, total=self.steps, unit="steps", rate=pace)
            figures = self._step(next(loader))
            self.step += 1
            options, step = self.options, self.step
            if step % options.log_every == 0 or step == self.steps:
                now = time.monotonic()
                rate = (step - done) / max(now - since, 1e-9)
                done, since = step, now
                figures = {name: float(value) for name, value in figures.items()}
                self._record(**figures, prompts_per_s=rate * options.batch_size)
                left = duration((self.steps - step) / rate)
                log.info(
                    "step %d/%d: loss %.4f, cosine %.4f, rate %.2e, %.1f prompts/s, %s left",
                    *(step, self.steps, figures["loss"], figures["cos"], figures["lr"]),
                    *(rate * options.batch_size, left),
                )
                self._look_at_plan()
            ended = step >= self.steps
            if step % options.val_every == 0 or ended:
                self._validate_and_keep_best()
            if options.keep_every and step % options.keep_every == 0:
                self.keep(self.last_val if step % options.val_every == 0 or ended else None)
            if requests.snapshot():
                self.keep(self.validate())  # never the best: a snapshot must not change what is trained
            stop = requests.stop() and not ended
            if step % options.save_every == 0 or ended or stop:
                self.save()
            if stop:
                raise StoppedError(f"stopped at step {step} as asked; the same command resumes there")
        self._finish(start)

    def _look_at_plan(self) -> None:
        try:
            steps = self.plan(self.steps)
        except TrainerError as error:
            log.warning("%s; going on with train.steps %d", error, self.steps)
            return
        if steps != self.steps:
            log.info("train.steps is now %d (it was %d)", steps, self.steps)
            self.steps = steps

    def _finish(self, start: float) -> None:
        """Leave the plan and settings in force where Snakemake looks for them, and a best checkpoint."""
        write_stage_settings(self.settings, "train")
        write_if_changed(self.inputs.run / "settings" / "plan.json", {"steps": self.steps})
        gone = not (self.folder / "best.safetensors").exists()
        if gone:
            log.info("the best checkpoint is gone: step %d stands in for it", self.step)
            self.best_cos = None
        if gone or not self._validated():  # not if the plan was lowered to where training had been stopped
            self._validate_and_keep_best()
            self.save()
        log.info("trained to step %d in %s; best val cosine %.4f", self.step, duration(_since(start)), self.best_cos)

    def _step(self, batch: Batch) -> dict[str, float | torch.Tensor]:
        rate = learning_rate(self.step, self.steps, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        while True:
            try:
                figures = self._gradients(batch)
                break
            except torch.OutOfMemoryError:
                if self.micro_batch == 1:
                    raise TrainerError(
                        f"out of memory on {self.device} with one prompt at a time: lower adapter.width or depth"
                    ) from None
                self.micro_batch = -(-self.micro_batch // 2)
                log.info("out of memory: going on with %d prompts a forward pass", self.micro_batch)
        limit = self.options.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), limit)
        if not torch.isfinite(norm):
            raise TrainerError(
                f"the gradient became {float(norm)} at step {self.step + 1}; the state saved before it is untouched: "
                "lower train.lr, or look at the shards' statistics in the report"
            )
        self.optimizer.step()
        return figures | {"lr": rate, "grad_norm": norm}

    def _gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Gradients of a whole batch, in parts if need be; gives its figures."""
        self.optimizer.zero_grad(set_to_none=True)
        rows = len(batch.target)
        sums = torch.zeros(3, dtype=torch.float64)
        for chunk in batch.split(self.micro_batch):
            chunk = chunk.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                part = scoring.loss(self.adapter, self.scale, chunk, self.options.cos_weight, self.metric)
            (part.objective / rows).backward()
            sums += torch.stack([part.objective.detach(), part.squared, part.cosine]).double().cpu()
        return dict(zip(("loss", "mse", "cos"), sums / rows, strict=True))


def _since(start: float) -> float:
    return time.monotonic() - start


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`train.lr 0.001 -> 0.002`, for people."""
    found = []
    for group in new:
        before, after = old.get(group), new[group]
        if isinstance(after, dict) and isinstance(before, dict):
            found += [f"{group}.{k} {before.get(k)} -> {v}" for k, v in after.items() if before.get(k) != v]
        elif before != after:
            found.append(f"other {group.replace('_', ' ')}")
    return found


def train(settings: Settings, inputs: Inputs, plan: Callable[[int], int], requests: Requests, output: Path) -> None:
    """Train as far as the plan says, or find that this is done; then `output` is the best checkpoint."""
    trainer = Trainer(settings, inputs, plan)
    trainer.run(requests)
    with written_whole(output) as aside:
        shutil.copyfile(trainer.folder / "best.safetensors", aside)
