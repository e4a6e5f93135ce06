"""Training LoRAs: resumes to the byte, validates without a trace, adds up its parts, stops at what is not finite."""

import csv
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny_lora_runs as runs
import torch
from trainer import checkpoints, control, train_process, training
from trainer.errors import TrainerError
from trainer.files import write_json
from trainer.lora import batches, conditions, evaluation, families, ladder, models, network, objective, verdict
from trainer.lora.task import LoraTask
from trainer.materials import read_record


class Asked(control.Requests):
    """Requests that come at a given look, without signals."""

    def __init__(self, run, stop_at=None):
        super().__init__(run)
        self.looks, self.stop_at = 0, stop_at

    def stop(self):
        self.looks += 1
        return self.looks == self.stop_at


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def made(folders, tmp_path):
    """Settings of a run that is made, in a folder of the test's own."""

    def make(name, family="z_image", lora=None, pictures=5, masks=False, **train):
        settings = runs.settings(tmp_path / name, family, lora, **train)
        runs.make(settings, runs.base(folders, family), pictures, masks)
        return settings

    return make


def go(settings, **asked):
    run = Path(settings.folder)
    training.train(settings, LoraTask, lambda steps: steps, Asked(run, **asked), run / "trained.safetensors")


def saved(settings, name="state"):
    return checkpoints.load(Path(settings.folder) / "checkpoints" / f"{name}.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def read(trainer, position=0, rank=0, processes=1):
    loader = trainer.task.loader(position, rank, processes)
    try:
        return next(loader)
    finally:
        loader.close()


def gradients(trainer, batch, size):
    sums = trainer._gradients(batch, size)
    return sums, torch.cat([it.grad.flatten() for it in trainer.trained.values() if it.grad is not None])


def with_values(trainer):
    """The trainer, its LoRA's up matrices no longer zero."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, it in trainer.trained.items():
            if "lora_B" in name:
                it.copy_(0.1 * torch.randn(it.shape, generator=random))
    return trainer


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, {}) for family in runs.FAMILIES), ("z_image", {"ema": 0.9, "dropout": 0.3, "checkpointing": False})],
)
def test_a_run_stopped_and_resumed_ends_in_the_same_bytes(made, family, lora):
    plain, broken = made("a", family, lora), made("b", family, lora)
    go(plain)
    with pytest.raises(training.StoppedError, match="same command resumes"):
        go(broken, stop_at=3)
    go(broken)
    for name in ("state", "best"):
        (one, meta), (other, again) = saved(plain, name), saved(broken, name)
        assert_same(one, other)
        assert meta == again
    assert all(it.isfinite().all() for it in one.values())
    rows = [list(csv.DictReader((Path(it.folder) / "metrics.csv").open())) for it in (plain, broken)]
    own = ("time", "pictures_per_s")
    assert [*({k: v for k, v in row.items() if k not in own} for row in rows[0])] == [
        *({k: v for k, v in row.items() if k not in own} for row in rows[1])
    ]


def test_a_run_that_was_killed_goes_on_from_its_last_save_to_the_same_bytes(made, monkeypatch):
    plain, killed = made("a"), made("b")
    go(plain)
    step = training.Trainer._step

    def dies(self, *batch):
        if self.step == 6:  # saved at 4
            raise KeyboardInterrupt
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "_step", dies)
        with pytest.raises(KeyboardInterrupt):
            go(killed)
    assert saved(killed)[1]["step"] == 4
    go(killed)
    for name in ("state", "best"):
        assert_same(saved(plain, name)[0], saved(killed, name)[0])


def in_a_process_of_its_own(settings):
    """Train as the job does; gives the exit status."""
    child = os.fork()
    if not child:
        code = 70
        try:
            run, source = Path(settings.folder), Path(settings.folder) / "own.yaml"
            source.write_text(f"train: {{steps: {settings.train.steps}}}")
            train_process.run(
                {
                    "settings": settings.model_dump(),
                    "configfiles": [str(source)],
                    "overrides": {},
                    "log": str(run / "logs" / "train.log"),
                    "output": str(run / "trained.safetensors"),
                }
            )
            code = 0
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_discarded_training_leaves_nothing_of_itself_also_before_the_base_is_loaded(made, monkeypatch):
    settings, plain = made("a"), made("b")
    run = Path(settings.folder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    with pytest.raises(training.StoppedError):
        go(settings, stop_at=3)
    assert (run / "checkpoints").exists()
    control.request_stop(run, discard=True)
    monkeypatch.setattr(network, "load", None)  # nothing is
    assert in_a_process_of_its_own(settings) == 1
    assert "what was not finished is thrown away" in (run / "logs" / "train.log").read_text()
    left = {path for path in run.rglob("*") if path.is_file() and path not in before}
    assert {path.relative_to(run).parts[0] for path in left} <= {"control", "logs", "own.yaml"}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    monkeypatch.undo()
    control.clear_stop(run)
    step = training.Trainer._step

    def asks(self, *batch):
        if self.step == 5:  # saved at 4
            control.request_stop(run, wait=0, discard=True)
        return step(self, *batch)

    monkeypatch.setattr(training.Trainer, "_step", asks)
    monkeypatch.setattr(control, "_wait_until", lambda *_: None)
    assert in_a_process_of_its_own(settings) == 1
    assert not [it.name for it in run.iterdir() if it.name in ("checkpoints", "metrics.csv", "tensorboard")]
    monkeypatch.undo()
    control.clear_stop(run)
    go(settings)
    go(plain)
    assert_same(saved(settings)[0], saved(plain)[0])


def test_training_learns_and_the_lowest_validation_loss_is_the_best(made):
    settings = made("a", steps=60, lr=1e-2, val_every=20, save_every=60)
    go(settings)
    rows = [row for row in csv.DictReader((Path(settings.folder) / "metrics.csv").open()) if row["val_loss"]]
    losses = [float(row["val_loss"]) for row in rows]
    meta = saved(settings, "best")[1]
    assert meta["best_loss"] == meta["val"]["loss"] == pytest.approx(min(losses), abs=1e-5)
    assert min(losses) < 0.97 * meta["val"]["base_loss"]
    bands = [float(rows[-1][f"val_loss_{level}"]) for level in objective.BANDS]
    assert sum(bands) / 5 == pytest.approx(losses[-1], abs=1e-5)
    assert all(float(rows[-1][f"loss_{level}"]) > 0 for level in objective.BANDS)


def test_checkpoints_hold_the_lora_under_the_names_of_files_and_nothing_of_the_base(made):
    settings = made("a", keep_every=4)
    go(settings)
    names = {f"model.{it}" for it in network.parameters(runs.trainer(settings).task.module)}
    assert all(".default" not in name for name in names)
    assert set(saved(settings, "best")[0]) == set(saved(settings, "step-0000004")[0]) == names
    others = {name for name in saved(settings)[0] if not name.startswith(("optimizer.", "model."))}
    assert others == {"updates", "bands"}
    meta = saved(settings)[1]
    made_from = meta["made_from"]
    assert (made_from["base_precision"], made_from["lora"]["optimizer"]) == ("f32", "adamw")  # what auto came to
    assert meta["told"]["attention"] == "ZSingleStreamAttnProcessor; native"


def test_validation_is_the_same_each_time_and_leaves_no_trace_in_training(made):
    lora = {"ema": 0.9, "dropout": 0.3}
    often, rarely = made("a", lora=lora, val_every=1), made("b", lora=lora, val_every=8)
    go(often)
    go(rarely)
    assert_same(saved(often)[0], saved(rarely)[0])
    task = runs.trainer(often).task
    before = torch.get_rng_state()
    figures = task.validate()
    assert figures == task.validate() == saved(often)[1]["last_val"]
    assert torch.equal(before, torch.get_rng_state())


def test_validation_before_training_is_that_of_the_base(made):
    figures = runs.trainer(made("a", "flux")).task.validate()
    for name in ("loss", *(f"loss_{level}" for level in objective.BANDS)):
        assert figures[name] == figures[f"base_{name}"] > 0


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_gradients_of_parts_of_a_batch_add_up_to_those_of_the_batch(made, family):
    trainer = with_values(runs.trainer(made("a", family, batch_size=5)))
    batch, size = read(trainer)
    assert len(batch.parts) == 2  # of two buckets
    found = []
    for places in (10**9, 1):
        trainer.task.places = places
        found.append(gradients(trainer, batch, size))
    assert len(trainer.task.seen) == 5
    (one, whole), (other, summed) = found
    assert torch.allclose(one, other, rtol=1e-5)
    assert (whole - summed).norm() <= 1e-5 * whole.norm()


def test_gradients_of_the_shares_of_processes_add_up_to_those_of_the_batch(made):
    trainer = with_values(runs.trainer(made("a", batch_size=4)))
    found = [gradients(trainer, *read(trainer, 4, *share)) for share in ((0, 1), (0, 2), (1, 2))]
    assert torch.allclose(found[0][0], found[1][0] + found[2][0], rtol=1e-5)
    assert (found[0][1] - found[1][1] - found[2][1]).norm() <= 1e-5 * found[0][1].norm()


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_loss_is_the_weighted_mean_over_the_pictures(made, family):
    trainer = with_values(runs.trainer(made("a", family, masks=True)))
    task = trainer.task
    batch, size = read(trainer)
    said = []
    predict = task.model.predict

    def listened(module, noisy, t, *more):
        prediction = predict(module, noisy, t, *more)
        said.append((noisy, t, prediction.detach()))
        return prediction

    task.model.predict = listened
    halved = batches.Batch(tuple(replace(it, weights=it.weights * 0.5) for it in batch.parts))
    whole, half = (float(trainer._gradients(it, size)[0]) for it in (batch, halved))
    assert whole == pytest.approx(2 * half, rel=1e-6)
    expected = 0.0
    for part, (noisy, t, prediction) in zip(batch.parts, said, strict=False):
        for number, place in enumerate(part.positions):
            latents, at = part.latents[number], t[number]
            if family == "flux":  # (1 - s) x + s n
                share = at / 1000
                noise = (noisy[number] - (1 - share) * latents) / share
                target, weight = noise - latents, 1.0
            else:
                a = task.schedule.alphas[int(at)]
                noise = (noisy[number] - a.sqrt() * latents) / (1 - a).sqrt()
                target, weight = noise, min(float(a / (1 - a)), 5.0) / float(a / (1 - a))
            squared = (prediction[number] - target).square()[:, :2]  # the mask is 1 there and 0 elsewhere
            expected += weight * float(squared.mean())
            assert place == part.positions[number]
    assert whole == pytest.approx(expected, rel=1e-3)


def test_turning_one_knob_moves_nothing_else_that_is_drawn(made, monkeypatch):
    heard = {}
    for name, lora in (("none", {"text_dropout": 0.0}), ("all", {"text_dropout": 1.0, "dropout": 0.5})):
        trainer = runs.trainer(made(name, lora=lora))
        said, predict = heard.setdefault(name, []), trainer.task.model.predict

        def listened(module, noisy, t, given, *more, said=said, predict=predict):
            said.append((noisy, t, given))
            return predict(module, noisy, t, given, *more)

        trainer.task.model.predict = listened
        trainer._gradients(*read(trainer, 2))
    for (noisy, t, given), (again, same, dropped) in zip(heard["none"], heard["all"], strict=True):
        assert torch.equal(noisy, again)
        assert torch.equal(t, same)
        assert not any(torch.equal(it["embeds"], other["embeds"]) for it, other in zip(given, dropped, strict=False))
        assert all(torch.equal(dropped[0]["embeds"], it["embeds"]) for it in dropped)  # of the empty caption


def test_means_of_the_weights_follow_the_ramp_and_are_what_is_exported(made):
    trainer = runs.trainer(made("a", lora={"ema": 0.5}))
    names = list(trainer.task.weight)
    expected = {name: it.detach().clone() for name, it in trainer.task.weight.items()}
    for step in range(8):
        trainer._step(*read(trainer, 2 * step))
        trainer.step += 1
        decay = min(0.5, (1 + step) / (10 + step))
        for name, it in trainer.task.weight.items():
            expected[name] = decay * expected[name] + (1 - decay) * it.detach()
    exported = trainer.task.weights()
    assert all(torch.allclose(exported[f"model.{name}"], expected[name], atol=1e-7) for name in names)
    assert any(not torch.equal(exported[f"model.{name}"], trainer.task.weight[name]) for name in names)
    kept = {name: it.detach().clone() for name, it in trainer.task.weight.items()}
    trainer.task.validate()
    assert all(torch.equal(it, trainer.task.weight[name]) for name, it in kept.items())


def test_the_largest_bucket_goes_through_before_the_first_step_and_changes_nothing(made, monkeypatch):
    tried, plain = made("a"), made("b")
    sizes, loss = [], LoraTask.loss

    def seen(self, part):
        sizes.append(tuple(part.latents.shape[2:]))
        return loss(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(LoraTask, "loss", seen)
        go(tried)
    assert sizes[0] == (16, 8)
    with monkeypatch.context() as patch:
        patch.setattr(LoraTask, "largest", lambda self: None)
        go(plain)
    assert_same(saved(tried)[0], saved(plain)[0])


def test_out_of_memory_goes_on_with_smaller_parts_and_then_recomputed_blocks(made, monkeypatch):
    trainer = with_values(runs.trainer(made("a", lora={"checkpointing": False}, batch_size=4)))
    batch, size = read(trainer)
    _, expected = gradients(trainer, batch, size)
    loss, counts = LoraTask.loss, []

    def short(self, part):
        counts.append(len(part))
        if len(part) > 1 or not self.module.is_gradient_checkpointing:
            raise torch.OutOfMemoryError("as a GPU would")
        return loss(self, part)

    monkeypatch.setattr(LoraTask, "loss", short)
    _, found = gradients(trainer, batch, size)
    assert counts[-4:] == [1] * 4
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    monkeypatch.setattr(LoraTask, "loss", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("still")))
    with pytest.raises(TrainerError, match=r"lower pictures\.resolution"):
        trainer._gradients(batch, size)


def test_latents_that_are_not_finite_stop_training_by_the_picture_and_the_last_checkpoint_stays(made):
    settings = made("a", batch_size=1, save_every=1, val_every=100, steps=50)
    run = Path(settings.folder)
    path = run / "shards" / "train" / "0000-00.safetensors"
    shard = conditions.Shard(path)
    items = {id: shard.item(id) for id in shard.items}
    order = batches.Order([row.bucket for row in runs.trainer(settings).task.train.rows], settings.train.seed, 1)
    row = runs.trainer(settings).task.train.rows[order[3]]
    for variant in range(2):
        items[row.id].tensors[f"{variant}/mean"][0, 0, 0] = math.nan
    conditions.write(path, items, {"skipped": []})
    trainer = runs.trainer(settings)
    with pytest.raises(TrainerError, match=rf"in step 4 \({row.file}: its latents are not finite\)"):
        trainer.run(Asked(run))
    trainer.writer.wait()
    tensors, meta = saved(settings)
    assert meta["step"] == trainer.step == 3
    assert all(it.isfinite().all() for it in [*tensors.values(), *trainer.trained.values()])


def test_a_gradient_that_is_not_finite_names_the_pictures_of_its_batch(made):
    trainer = runs.trainer(made("a"))
    next(iter(trainer.trained.values())).register_hook(lambda gradient: gradient * math.inf)
    batch, size = read(trainer)
    with pytest.raises(TrainerError, match="; ".join(file for it in batch.parts for file in it.files)):
        trainer._step(batch, size)
    assert all(it.isfinite().all() for it in trainer.trained.values())


def test_without_clipping_steps_are_taken_whole_and_norms_are_told(made):
    found = []
    for name, clip in (("off", 0.0), ("tight", 1e-6)):
        trainer = with_values(runs.trainer(made(name, grad_clip=clip)))
        before = {it: value.detach().clone() for it, value in trainer.trained.items()}
        norm = trainer._step(*read(trainer))["grad_norm"].item()
        found.append((norm, torch.cat([it.grad.flatten() for it in trainer.trained.values() if it.grad is not None])))
        assert any(not torch.equal(before[it], value) for it, value in trainer.trained.items())
    (norm, whole), (same, clipped) = found
    assert norm == same == pytest.approx(whole.norm().item(), rel=1e-5)  # that before clipping
    assert clipped.norm() == pytest.approx(1e-6, rel=1e-2)


def test_kernels_are_made_for_dense_bases_only(made):
    task = runs.trainer(made("a")).task
    task.numbers = "nf4"
    task.compiled = True
    assert not task.compiled
    assert not any(it._compiled_call_impl for it in task.module.modules())


def test_a_base_in_f16_trains_on_gradients_that_do_not_vanish(made):
    whole, half = (with_values(runs.trainer(made(it, "sdxl", {"base_precision": it}))) for it in ("f32", "f16"))
    batch, size = read(whole)
    (_, expected), (_, found) = gradients(whole, batch, size), gradients(half, batch, size)
    assert (found - expected).norm() < 0.05 * expected.norm()
    small = found != 0
    assert small.float().mean() > 0.99


@pytest.mark.parametrize(("name", "package"), [("adamw8bit", "bitsandbytes"), ("prodigy", "prodigyopt")])
def test_an_optimizer_whose_package_is_missing_is_told_in_words(made, monkeypatch, name, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, f"{package}.optim", None)
    with pytest.raises(TrainerError, match=f"pip install {package}"):
        runs.trainer(made("a", lora={"optimizer": name}))


@pytest.mark.parametrize(("name", "package", "lr"), [("adamw8bit", "bitsandbytes", 1e-3), ("prodigy", "prodigyopt", 1)])
def test_other_optimizers_resume_to_the_byte(made, name, package, lr):
    pytest.importorskip(package)
    plain, broken = (made(it, lora={"optimizer": name}, lr=lr) for it in "ab")
    go(plain)
    with pytest.raises(training.StoppedError):
        go(broken, stop_at=3)
    go(broken)
    assert_same(saved(plain)[0], saved(broken)[0])


@pytest.mark.parametrize(("lora", "train"), [({"rank": 8}, {}), ({}, {"lr": 1e-3}), ({"base_precision": "bf16"}, {})])
def test_other_settings_start_over_and_keep_the_old_checkpoints(made, folders, tmp_path, lora, train):
    settings = made("a", steps=4)
    go(settings)
    changed = runs.settings(tmp_path / "a", "z_image", lora, steps=4, **train)
    assert runs.trainer(changed).step == 0
    (stale,) = Path(settings.folder).glob("checkpoints.stale-*")
    assert (stale / "best.safetensors").exists()


def test_rungs_are_measured_and_kept_whatever_the_settings_say(made):
    settings = made("a", steps=22, val_every=50, log_every=50, save_every=50, keep_every=3, keep_last=2)
    go(settings)
    run = Path(settings.folder)
    steps = [1, 18, 20, 21]
    assert checkpoints.kept(run / "checkpoints") == [checkpoints.kept_path(run / "checkpoints", it) for it in steps]
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows if row["loss"]] == [*range(1, 21), 22]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [1, 20, 22]


def test_training_until_a_rung_goes_on_to_the_same_bytes(made):
    plain, begun = made("a", steps=24, decay_fraction=0.5), made("b", steps=24, decay_fraction=0.5)
    go(plain)
    run = Path(begun.folder)
    for until in (20, 1):  # which is behind by then
        training.train(begun, LoraTask, lambda steps: steps, Asked(run), None, until)
        assert saved(begun)[1]["step"] == 20
    assert not (run / "settings" / "plan.json").exists()
    go(begun)
    assert saved(plain)[1] == saved(begun)[1]
    assert_same(saved(plain)[0], saved(begun)[0])


def test_all_rungs_of_a_training_are_judged_by_what_it_kept(made, folders):
    settings = made("a", "flux", {"checkpointing": False}, steps=500, batch_size=1, val_every=250, save_every=500)
    go(settings)
    run, family = Path(settings.folder), families.get("flux")
    write_json(run / "corpus.json", {"digest": "d", "train": {"pictures": 5}, "val": {"held_out": True}})
    meta = saved(settings, "best")[1]
    base = models.of(runs.base(folders, "flux")).network(torch.float32, torch.device("cpu"))
    modules = network.targets(base, family, [])
    wanted = evaluation.expected(family, base, modules, 4, torch.bfloat16)
    records = [asdict(read_record(run / "materials" / "base.json"))]

    def judged(upto):
        return verdict._course(settings, records, run / "eval", meta, wanted, upto)

    rungs = {rung.name: rung for rung in judged(500)}
    assert list(rungs) == ["1", "20", "100", "500"]
    failed = [line for line in ladder.failures(ladder.to_json(rungs.values())) if ": val is" not in line]
    assert failed == []  # the picture that is held out is like no other
    rows = {row.name: row for row in rungs["500"].rows}
    assert rows["norm of the LoRA"].passed
    assert rows["live lora_B"].passed
    assert f"of step {meta['step']}" in rows["val of held-out pictures"].words
    assert [rung.name for rung in judged(20)] == ["1", "20"]
