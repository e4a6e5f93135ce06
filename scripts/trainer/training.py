"""The training loop: resumes to the byte, follows the plan while it runs, stops when asked, keeps the best.

What is trained is a `trainer.task.Task`.
"""

import csv
import io
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from trainer import checkpoints, optimizer_state, recipe
from trainer.config import Settings, write_stage_settings
from trainer.control import Requests
from trainer.errors import StoppedError, TrainerError
from trainer.files import write_if_changed, write_text, written_whole
from trainer.job import announce, duration, log
from trainer.processes import Together
from trainer.task import Batches, Task

# Share of the time that training waits for the loader from which on the log says so.
WAITING = 0.03


class Trainer:
    """One training run, from the state on disk (if it belongs to these inputs) to the planned step."""

    def __init__(self, settings: Settings, task: type[Task], plan: Callable[[int], int]) -> None:
        """`plan` gives the planned steps as the user's files say now, from those in force."""
        # Before CUDA starts: without it, matrix products on a GPU differ from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else every new tensor is filled first, lest what was not written is read: that is never done, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("high")
        self.settings, self.options, self.plan = settings, settings.train, plan
        self.run_folder = Path(settings.folder)
        self.folder = self.run_folder / "checkpoints"
        self.metrics_file = self.run_folder / "metrics.csv"
        self.together = Together(settings.train.device, settings.train.processes)
        self.device = self.together.device
        self.task = task(settings, self.device)
        self.trained = {name: it for name, it in self.task.module.named_parameters() if it.requires_grad}
        self.main_column, self.main_figure = next(iter(self.task.val_columns.items()))
        self.writer = checkpoints.Writer()
        self.finite = torch.tensor(True, device=self.device)
        self.steps, self.step = settings.train.steps, 0
        self.best: float | None = None
        self.last_val: dict[str, float] | None = None
        self.records: list[dict[str, Any]] = []
        self._resume()
        self.task.compiled = self.options.compile

    # -- state ---------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = self.folder / "state.safetensors"
        if path.exists():
            tensors, meta = checkpoints.load(path)
            if meta["made_from"] == self.task.made_from and "optimizer" in meta:
                self._restore(tensors, meta)
                log.info("resuming at step %d of %d", self.step, self.steps)
                return
            self._set_aside(_differences(meta["made_from"], self.task.made_from) or ["another version of this program"])
        log.info("training from the start to step %d", self.steps)

    def _set_aside(self, reasons: list[str]) -> None:
        self.together.leaders(self.step)  # meets the others: they have read them
        if not self.together.leader:
            return
        place = checkpoints.set_aside(self.folder)
        log.info(
            "the checkpoints were trained with other inputs (%s): moved to %s, training starts over",
            *(", ".join(reasons), place),
        )

    def _restore(self, tensors: checkpoints.Tensors, meta: dict[str, Any]) -> None:
        self.task.restore(tensors)
        optimizer_state.unpack(self.task.optimizer, self.trained, tensors, meta["optimizer"])
        self.step, self.best, self.last_val = meta["step"], meta[self._best_name], meta["last_val"]
        self.task.told = meta.get("told", {}) | self.task.told
        if self.metrics_file.exists():
            rows = csv.DictReader(io.StringIO(self.metrics_file.read_text()))
            self.records = [row for row in rows if row["step"].isdigit() and int(row["step"]) <= self.step]

    @property
    def _best_name(self) -> str:
        return self.main_column.replace("val_", "best_")

    def _meta(self, **more: Any) -> dict[str, Any]:
        return {
            "step": self.step,
            "steps": self.steps,
            self._best_name: self.best,
            "last_val": self.last_val,
            "made_from": self.task.made_from,
            "told": dict(self.task.told),
        } | more

    def _weights(self) -> checkpoints.Tensors:
        return checkpoints.copies(self.task.weights())

    def save(self) -> None:
        """Save the state, while training goes on; the previous one stays until the new one is whole."""
        tensors, values = optimizer_state.pack(self.task.optimizer, self.trained)
        tensors = checkpoints.copies(tensors | self.task.state()) | self._weights()
        self.writer.submit(self._write_state, tensors, self._meta(optimizer=values), list(self.records))

    def _write_state(self, tensors: checkpoints.Tensors, meta: dict[str, Any], records: list[dict[str, Any]]) -> None:
        # First, so that a resume finds every step before the state's.
        text, task = io.StringIO(), self.task
        columns = ["step", "time", *task.columns, "lr", "grad_norm", f"{task.unit}_per_s", *task.val_columns]
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.metrics_file, text.getvalue())
        checkpoints.save(self.folder / "state.safetensors", tensors, meta)

    def keep(self, val: dict[str, float] | None) -> None:
        """Keep this step for export at any later time."""
        self.writer.submit(self._write_kept, self._weights(), self._meta(val=val), self.step)

    def _write_kept(self, weights: checkpoints.Tensors, meta: dict[str, Any], step: int) -> None:
        checkpoints.save(checkpoints.kept_path(self.folder, step), self.task.kept(weights), meta)
        if self.options.keep_last:
            rungs = {checkpoints.kept_path(self.folder, rung) for rung in self.task.rungs}
            others = [path for path in checkpoints.kept(self.folder) if path not in rungs]
            for old in others[: -self.options.keep_last]:
                old.unlink()

    # -- figures -------------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Figures of the current weights on the val split."""
        metrics = self.task.validate()
        log.info("step %d: %s", self.step, _in_words(self._shown(metrics)))
        return metrics

    def _shown(self, metrics: dict[str, float]) -> dict[str, float]:
        return {column: metrics[name] for column, name in self.task.val_columns.items()}

    def _validate_and_keep_best(self) -> None:
        self.last_val = metrics = self.validate()
        self._record(**self._shown(metrics))
        figure, sign = metrics[self.main_figure], 1 if self.task.higher_is_better else -1
        if self.best is None or sign * figure > sign * self.best:
            self.best = figure
            self.writer.submit(
                *(checkpoints.save, self.folder / "best.safetensors", self._weights(), self._meta(val=metrics))
            )

    def _validated(self) -> bool:
        """Whether the current step was validated."""
        last = self.records[-1] if self.records else {"step": -1}
        return int(last["step"]) == self.step and bool(last.get(self.main_column))

    def _record(self, **values: float) -> None:
        if not self.records or int(self.records[-1]["step"]) != self.step:
            self.records.append({"step": self.step, "time": f"{time.time():.1f}"})
        self.records[-1] |= {name: f"{value:.6g}" for name, value in values.items()}
        for name, value in values.items():
            self.events.add_scalar(name, value, self.step)
        announce(metrics=[row for name in ("loss", self.main_column) if (row := self._newest(name))])

    def _newest(self, column: str) -> dict[str, Any] | None:
        return next((row for row in reversed(self.records) if row.get(column)), None)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, requests: Requests, until: int | None = None) -> None:
        """Train to the planned step, or to `until` if that comes before: then the state is saved, and no more.

        Raises:
            StoppedError: asked to, in the leader; the state is saved.
            TrainerError: the loss is not finite, a shard is damaged, the disk is full.
        """
        events = self.run_folder / "tensorboard"
        self.events = SummaryWriter(events, purge_step=self.step + 1) if self.together.leader else None
        loader = self.loader()
        try:
            if self.step < self.steps and (largest := self.task.largest()):
                self._gradients(*largest)  # out of memory comes now, or not at all
            self._follow(loader, requests, until)
            self.writer.wait()
        finally:
            loader.close()
            if self.events:
                self.events.close()

    def loader(self) -> Batches:
        """The batches from the current step on."""
        return self.task.loader(self.step * self.options.batch_size, self.together.rank, self.together.size)

    def _follow(self, loader: Batches, requests: Requests, until: int | None) -> None:
        options, leader = self.options, self.together.leader
        pace = Pace(self.step)
        while self.step < self.steps:
            announce(what="training", done=self.step, total=self.steps, unit="steps", rate=pace.overall(self.step))
            figures = self._step(*next(loader))
            self.step += 1
            step = self.step
            if leader:
                self.writer.look()
            on_rung = step in self.task.rungs
            if leader and (step % options.log_every == 0 or step == self.steps or on_rung or step <= self.task.closely):
                self._check()
                self._report(figures, *pace.lap(step, loader.waited))
                self._look_at_plan()
            asked = (requests.snapshot(), requests.stop()) if leader else (False, False)
            self.steps, snapshot, stop = self.together.leaders(self.steps, *asked)
            ended = step >= self.steps
            stop = stop or step == until
            validated = step % options.val_every == 0 or ended or on_rung
            kept = on_rung or (bool(options.keep_every) and step % options.keep_every == 0)
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
                if not leader or step == until:
                    return
                self.writer.wait()
                raise StoppedError(f"stopped at step {step} as asked; the same command resumes there")
        if leader:
            self._finish(pace)

    def _report(self, figures: dict[str, float | torch.Tensor], rate: float, waited: float) -> None:
        figures = {name: found for name, value in figures.items() if not math.isnan(found := float(value))}
        unit, speed = self.task.unit, rate * self.options.batch_size
        self._record(**figures, **{f"{unit}_per_s": speed})
        log.info(
            "step %d/%d: %s, rate %.2e, %.1f %s/s, %s left%s",
            *(self.step, self.steps, _in_words({it: figures[it] for it in self.task.columns if it in figures})),
            *(figures["lr"], speed, unit),
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
        write_if_changed(self.run_folder / "settings" / "plan.json", {"steps": self.steps})
        gone = not (self.folder / "best.safetensors").exists()
        if gone:
            log.info("the best checkpoint is gone: step %d stands in for it", self.step)
            self.best = None
        if gone or not self._validated():  # not if the plan was lowered to where training had been stopped
            self._validate_and_keep_best()
            self.save()
        spent = duration(pace.spent)
        log.info("trained to step %d in %s; best %s %.4f", self.step, spent, self.main_column, self.best)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, batch: Any, size: int) -> dict[str, float | torch.Tensor]:
        """A step of the optimizer on (this process's share of) a batch; gives its figures."""
        task, rate = self.task, recipe.learning_rate(self.step, self.steps, self.options)
        for group in task.optimizer.param_groups:
            group["lr"] = rate
        sums = self._gradients(batch, size)
        gradients = [it.grad for it in self.trained.values() if it.grad is not None]
        self.together.add_up(gradients)
        self.together.add_up([sums])  # of f64: with them, the gradients would be sent as such
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.options.grad_clip or math.inf)
        # Looked at later: to wait for it here would leave a GPU idle at every step.
        self.finite &= torch.isfinite(norm)
        if task.checks_every_step:
            self._check(batch)
        task.optimizer.step()
        return task.figures(sums, size) | {"lr": rate, "grad_norm": norm}

    def _gradients(self, batch: Any, size: int) -> torch.Tensor:
        """Gradients of the batch's mean loss, in as much memory as there is; gives its sums, f64."""
        while True:
            try:
                return self._accumulate(batch, size)
            except torch.OutOfMemoryError:
                self.task.use_less_memory(batch)
            except RuntimeError as error:
                if not (self.task.compiled and _of_the_compiler(error)):
                    raise
                self.task.compiled = False
                reason = str(error).strip().partition("\n")[0]
                log.warning("train.compile: kernels cannot be made here (%s); going on without", reason)

    def _accumulate(self, batch: Any, size: int) -> torch.Tensor:
        self.task.optimizer.zero_grad(set_to_none=True)
        sums = []
        for part in self.task.parts(batch):
            loss, of_part = self.task.loss(part)
            (loss / size).backward()
            sums.append(of_part.double())
        return sum(sums)

    def _check(self, batch: Any = None) -> None:
        """Raises TrainerError if a gradient was not finite, that of this batch if there is one; nothing was written."""
        if self.finite:
            return
        if batch is None:
            raise TrainerError(
                f"a gradient was not finite in the last steps before {self.step + 1}; the state saved before is "
                "untouched: lower train.lr, or look at the shards' statistics in the report"
            )
        suspects = self.together.gathered(self.task.suspects(batch))
        named = [f"{name}: {wrong}" for name, wrong in suspects if wrong] or [name for name, _ in suspects]
        raise TrainerError(
            f"the loss or its gradient was not finite in step {self.step + 1} ({'; '.join(named)}); the state saved "
            f"before is untouched: look at these {self.task.unit}, or lower train.lr"
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


def _in_words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


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


def discard(run: Path) -> None:
    """Remove the training of a run, unless it has come to the end that was planned when it was saved."""
    folder = run / "checkpoints"
    with suppress(TrainerError):  # one that cannot be read is no end
        meta = checkpoints.read_meta(folder / "state.safetensors")
        if meta["step"] >= meta["steps"]:
            return
    for place in (folder, run / "tensorboard"):
        shutil.rmtree(place, ignore_errors=True)
    (run / "metrics.csv").unlink(missing_ok=True)


def train(
    settings: Settings,
    task: type[Task],
    plan: Callable[[int], int],
    requests: Requests,
    output: Path | None,
    until: int | None = None,
) -> None:
    """Train as far as the plan says, or find that this is done; then `output` is the best checkpoint.

    With `until`, train to that step if it is not reached yet; what was trained goes on from there at any later time.
    """
    trainer = Trainer(settings, task, plan)
    if until is None or trainer.step < until:
        trainer.run(requests, until)
    if output and trainer.together.leader:
        with written_whole(output) as aside:
            shutil.copyfile(trainer.folder / "best.safetensors", aside)
