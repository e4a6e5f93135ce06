"""The training loop: resumes to the byte, follows the plan while it runs, stops when asked, keeps the best."""

import csv
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter

from trainer import adapters, checkpoints, devices, packs, recipe, scoring
from trainer.batches import Batch
from trainer.config import Settings, stage_settings, write_stage_settings
from trainer.control import Requests
from trainer.errors import StoppedError, TrainerError
from trainer.files import digest, read_json, write_if_changed, write_text, written_whole
from trainer.job import announce, duration, log
from trainer.loading import Loader
from trainer.processes import Together
from trainer.shard_index import listed, trained_on
from trainer.shards import Shard
from trainer.vocabulary import Vocabulary

COLUMNS = ["step", "time", "loss", "mse", "cos", "lr", "grad_norm", "prompts_per_s", "val_cos", "val_rel_mse"]

# Share of the time that training waits for the loader from which on the log says so.
WAITING = 0.03


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
        # Else every new tensor is filled first, lest what was not written is read: that is never done, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("high")
        self.settings, self.options, self.inputs, self.plan = settings, settings.train, inputs, plan
        self.steps = settings.train.steps
        self.together = Together(settings.train.device, settings.train.processes)
        self.device = self.together.device
        self.autocast = devices.multiplies_bf16(self.device)
        self.folder = inputs.run / "checkpoints"
        self.metrics_file = inputs.run / "metrics.csv"
        self.queries = settings.adapter.queries
        self.metric = packs.get(settings.pack).metric
        self.batch_tokens = self.options.batch_tokens or sys.maxsize
        self.made_from = {
            **stage_settings(settings, "train")["train"],
            "shards": trained_on(inputs.index),
        }
        self.made_from |= {name: digest(checkpoints.read_meta(path)) for name, path in inputs.given.items()}
        if not inputs.index["train"]["samples"] or not inputs.index["val"]["samples"]:
            raise TrainerError(f"the shards of {inputs.run} hold no samples; see corpus.json and the logs")
        self.train, self.val = ([Shard(path) for path in files] for files in (inputs.train, inputs.val))
        self.writer = checkpoints.Writer()
        self.finite = torch.tensor(True, device=self.device)
        self._start()
        self._resume()
        self.adapter.compiled = self.options.compile

    def _start(self) -> None:
        """A fresh adapter at step 0."""
        torch.manual_seed(self.options.seed)
        shape, given = self.settings.adapter, {name: load_file(path) for name, path in self.inputs.given.items()}
        self.vocabulary = None
        if shape.vocabulary:
            self.vocabulary = Vocabulary(
                recipe.seeds(given["seed_table"]["table"], self.options), self.train + self.val
            )
            shape = shape.model_copy(update={"vocabulary": len(self.vocabulary)})
        adapter = adapters.fresh(shape)
        if self.vocabulary:
            adapter.t5_embed.weight.data = self.vocabulary.start
        if shape.vision_dim:
            adapter.vision_proj.weight.copy_(given["vision_proj"]["weight"])
        self.adapter = adapter.to(self.device)
        self.scale = recipe.standardization(self.train, self.options, self.metric).to(self.device)
        self.optimizer = recipe.optimizer(self.adapter, self.options)
        self.step = 0
        self.best_cos: float | None = None
        self.last_val: dict[str, float] | None = None

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
            self._set_aside(meta["made_from"])
        log.info("training from the start to step %d", self.steps)

    def _set_aside(self, made_from: dict[str, Any]) -> None:
        self.together.leaders(self.step)  # meets the others: they have read them
        if not self.together.leader:
            return
        place = checkpoints.set_aside(self.folder)
        log.info(
            "the checkpoints were trained with other inputs (%s): moved to %s, training starts over",
            *(", ".join(_differences(made_from, self.made_from)), place),
        )

    def _restore(self, tensors: checkpoints.Tensors, meta: dict[str, Any]) -> None:
        weights, scale = checkpoints.unpack(tensors)
        if self.vocabulary:
            weights["t5_embed.weight"] = self.vocabulary.narrow(weights["t5_embed.weight"])
        self.adapter.load_state_dict(weights)
        self.scale = scale.to(self.device)
        self.step, self.best_cos, self.last_val = meta["step"], meta["best_cos"], meta["last_val"]
        for name, parameter in self.adapter.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=self.device),
                "exp_avg": tensors[f"exp_avg.{name}"].to(self.device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(self.device),
            }
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

    def _packed(self) -> checkpoints.Tensors:
        """Copies of the weights, all rows of the seed table included, and the standardization."""
        weights = dict(self.adapter.state_dict())
        if self.vocabulary:
            weights["t5_embed.weight"] = self.vocabulary.widen(weights["t5_embed.weight"])
        return checkpoints.copies(checkpoints.pack(weights, self.scale))

    def save(self) -> None:
        """Save the state, while training goes on; the previous one stays until the new one is whole."""
        tensors = {
            f"{moment}.{name}": self.optimizer.state[parameter][moment]
            for name, parameter in self.adapter.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        tensors = checkpoints.copies(tensors) | self._packed()
        self.writer.submit(self._write_state, tensors, self._meta(), list(self.records))

    def _write_state(self, tensors: checkpoints.Tensors, meta: dict[str, Any], records: list[dict[str, Any]]) -> None:
        # First, so that a resume finds every step before the state's.
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.metrics_file, text.getvalue())
        checkpoints.save(self.folder / "state.safetensors", tensors, meta)

    def keep(self, val: dict[str, float] | None) -> None:
        """Keep this step for export at any later time."""
        self.writer.submit(self._write_kept, self._packed(), self._meta(val=val), self.step)

    def _write_kept(self, packed: checkpoints.Tensors, meta: dict[str, Any], step: int) -> None:
        weights, scale = checkpoints.unpack(packed)
        tensors = checkpoints.exported(weights, scale) | {"mean_row": scale.mean}
        checkpoints.save(checkpoints.kept_path(self.folder, step), tensors, meta)
        if self.options.keep_last:
            for old in checkpoints.kept(self.folder)[: -self.options.keep_last]:
                old.unlink()

    # -- figures -------------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Score the current weights on the val split."""
        self.adapter.eval()
        val = scoring.batches(self.val, self.options.batch_size, self.queries)
        if self.vocabulary:
            val = ((ids, self.vocabulary.numbered(batch)) for ids, batch in val)
        predict = scoring.predictor(self.adapter, self.scale)
        metrics = scoring.score(predict, val, self.scale.mean, self.metric).metrics()
        self.adapter.train()
        log.info("step %d: val cosine %.4f, rel_mse %.4f", self.step, metrics[self.metric], metrics["rel_mse"])
        return metrics

    def _validate_and_keep_best(self) -> None:
        self.last_val = metrics = self.validate()
        cosine = metrics[self.metric]
        self._record(val_cos=cosine, val_rel_mse=metrics["rel_mse"])
        if self.best_cos is None or cosine > self.best_cos:
            self.best_cos = cosine
            self.writer.submit(
                *(checkpoints.save, self.folder / "best.safetensors", self._packed(), self._meta(val=metrics))
            )

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

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, requests: Requests) -> None:
        """Train to the planned step.

        Raises:
            StoppedError: asked to, in the leader; the state is saved.
            TrainerError: the loss is not finite, a shard is damaged, the disk is full.
        """
        events = self.inputs.run / "tensorboard"
        self.events = SummaryWriter(events, purge_step=self.step + 1) if self.together.leader else None
        loader = self.loader()
        try:
            self._follow(loader, requests)
            self.writer.wait()
        finally:
            loader.close()
            if self.events:
                self.events.close()

    def loader(self) -> Loader:
        """The batches from the current step on."""
        return Loader(
            *(self.train, self.queries),
            seed=self.options.seed,
            window=int(self.options.shuffle_mb * 1e6),
            position=self.step * self.options.batch_size,
            size=self.options.batch_size,
            pin=self.device.type == "cuda",
            rank=self.together.rank,
            processes=self.together.size,
        )

    def _follow(self, loader: Loader, requests: Requests) -> None:
        options, leader = self.options, self.together.leader
        pace = Pace(self.step)
        while self.step < self.steps:
            announce(what="training", done=self.step, total=self.steps, unit="steps", rate=pace.overall(self.step))
            figures = self._step(*next(loader))
            self.step += 1
            step = self.step
            if leader:
                self.writer.look()
            if leader and (step % options.log_every == 0 or step == self.steps):
                self._check()
                self._report(figures, *pace.lap(step, loader.waited))
                self._look_at_plan()
            asked = (requests.snapshot(), requests.stop()) if leader else (False, False)
            self.steps, snapshot, stop = self.together.leaders(self.steps, *asked)
            ended = step >= self.steps
            validated = step % options.val_every == 0 or ended
            kept = bool(options.keep_every) and step % options.keep_every == 0
            saved = step % options.save_every == 0 or ended or (stop and not ended)
            if leader and (validated or kept or saved or snapshot):
                self._check()
                if validated:
                    self._validate_and_keep_best()
                if kept:
                    self.keep(self.last_val if validated else None)
                if snapshot:
                    self.keep(self.validate())  # never the best: a snapshot must not change what is trained
                    self.writer.wait()
                    requests.answer_snapshot()
                if saved:
                    self.save()
            if stop and not ended:
                if not leader:
                    return
                self.writer.wait()
                raise StoppedError(f"stopped at step {step} as asked; the same command resumes there")
        if leader:
            self._finish(pace)

    def _report(self, figures: dict[str, float | torch.Tensor], rate: float, waited: float) -> None:
        figures = {name: float(value) for name, value in figures.items()}
        prompts = rate * self.options.batch_size
        self._record(**figures, prompts_per_s=prompts)
        log.info(
            "step %d/%d: loss %.4f, cosine %.4f, rate %.2e, %.1f prompts/s, %s left%s",
            *(self.step, self.steps, figures["loss"], figures["cos"], figures["lr"], prompts),
            duration((self.steps - self.step) / rate),
            f", {waited:.0%} of the time waiting for the disk" if waited > WAITING else "",
        )

    def _look_at_plan(self) -> None:
        try:
            steps = self.plan(self.steps)
        except TrainerError as error:
            log.warning("%s; going on with train.steps %d", error, self.steps)
            return
        if steps != self.steps:
            log.info("train.steps is now %d (it was %d)", steps, self.steps)
            self.steps = steps

    def _finish(self, pace: "Pace") -> None:
        """Leave the plan and settings in force where Snakemake looks for them, and a best checkpoint."""
        self.writer.wait()
        write_stage_settings(self.settings, "train")
        write_if_changed(self.inputs.run / "settings" / "plan.json", {"steps": self.steps})
        gone = not (self.folder / "best.safetensors").exists()
        if gone:
            log.info("the best checkpoint is gone: step %d stands in for it", self.step)
            self.best_cos = None
        if gone or not self._validated():  # not if the plan was lowered to where training had been stopped
            self._validate_and_keep_best()
            self.save()
        log.info("trained to step %d in %s; best val cosine %.4f", self.step, duration(pace.spent), self.best_cos)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, rows: int) -> dict[str, float | torch.Tensor]:
        """A step of the optimizer on (this process's share of) a batch of so many target rows; gives its figures."""
        rate = recipe.learning_rate(self.step, self.steps, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        while True:
            try:
                sums = self._gradients(batch, rows)
                break
            except torch.OutOfMemoryError:
                self._go_smaller(batch)
            except RuntimeError as error:
                if not (self.adapter.compiled and _of_the_compiler(error)):
                    raise
                self.adapter.compiled = False
                reason = str(error).strip().partition("\n")[0]
                log.warning("train.compile: kernels cannot be made here (%s); going on without", reason)
        parameters = list(self.adapter.parameters())
        self.together.add_up([parameter.grad for parameter in parameters])
        self.together.add_up([sums])  # of f64: with them, the gradients would be sent as such
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.grad_clip or math.inf)
        # Looked at later: to wait for it here would leave a GPU idle at every step.
        self.finite &= torch.isfinite(norm)
        self.optimizer.step()
        return dict(zip(("loss", "mse", "cos"), sums / rows, strict=True)) | {"lr": rate, "grad_norm": norm}

    def _gradients(self, batch: Batch, rows: int) -> torch.Tensor:
        """Gradients of the batch, in parts if need be; gives its sums of objective, squared error and cosine, f64."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.vocabulary:
            batch = self.vocabulary.numbered(batch)
        for chunk in batch.split(self.batch_tokens):
            chunk = chunk.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                part = scoring.loss(self.adapter, self.scale, chunk, self.options.cos_weight, self.metric)
            (part.objective / rows).backward()
            sums += torch.stack([part.objective.detach(), part.squared, part.cosine])
        return sums

    def _go_smaller(self, batch: Batch) -> None:
        """Use less memory for a batch: in smaller parts, then with blocks computed again in the backward pass."""
        sizes = [student + target for student, target in zip(batch.lengths, batch.counts, strict=True)]
        if self.batch_tokens > min(sizes):
            self.batch_tokens = min(self.batch_tokens, sum(sizes)) // 2
            log.info("out of memory: going on with %d rows a forward pass", self.batch_tokens)
        elif not self.adapter.recompute:
            self.adapter.recompute = True
            log.info("out of memory with one prompt at a time: going on with blocks computed twice")
        else:
            raise TrainerError(
                f"out of memory on {self.device} with one prompt at a time: lower adapter.width or depth"
            ) from None

    def _check(self) -> None:
        """Raises TrainerError if a gradient was not finite; what was saved before is untouched."""
        if not self.finite:
            raise TrainerError(
                f"a gradient was not finite in the last steps before {self.step + 1}; the state saved before is "
                "untouched: lower train.lr, or look at the shards' statistics in the report"
            )


class Pace:
    """How fast training is, and how much of the time it waits for the loader."""

    def __init__(self, step: int) -> None:
        self._start = self._since = time.monotonic()
        self._first = self._step = step
        self._waited = 0.0

    @property
    def spent(self) -> float:
        """Seconds from the first step on."""
        return time.monotonic() - self._start

    def overall(self, step: int) -> float:
        """Steps a second, validations and saves included."""
        return (step - self._first) / max(self.spent, 1e-9)

    def lap(self, step: int, waited: float) -> tuple[float, float]:
        """Steps a second since the last lap, and the share of the time spent waiting, from all seconds waited."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        rate, share = (step - self._step) / seconds, (waited - self._waited) / seconds
        self._since, self._step, self._waited = now, step, waited
        return rate, share


def _of_the_compiler(error: RuntimeError) -> bool:
    from torch._dynamo.exc import TorchDynamoException  # not at start: loading torch's compiler takes a second

    return isinstance(error, TorchDynamoException)


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
    if trainer.together.leader:
        with written_whole(output) as aside:
            shutil.copyfile(trainer.folder / "best.safetensors", aside)
