"""Training: resumes to the byte, follows the plan, stops, keeps the best."""

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from trainer import checkpoints, config, control, devices, recipe, scoring, shards, training
from trainer.adapter_task import AdapterTask
from trainer.adapters import layers
from trainer.config import Train
from trainer.errors import TrainerError
from trainer.files import read_json
from trainer.loading import Loader
from trainer.standardization import Standardization


class Asked(control.Requests):
    """Requests that come at a given look, without signals."""

    def __init__(self, run, stop_at=None, snapshot_at=None):
        super().__init__(run)
        self.looks, self.stop_at, self.snapshot_at = 0, stop_at, snapshot_at

    def stop(self):
        return self.stop_at is not None and self.looks >= self.stop_at

    def snapshot(self):
        self.looks += 1
        return self.looks == self.snapshot_at

    def answer_snapshot(self):
        newest = checkpoints.kept(self._folder.parent / "checkpoints")[-1]
        assert checkpoints.read_meta(newest)["step"] == self.looks, "who asked would take an older one"


def go(settings, inputs, plan=lambda steps: steps, **asked):
    training.train(settings, AdapterTask, plan, Asked(inputs.run, **asked), inputs.run / "trained.safetensors")


def weights(settings):
    folder = Path(settings.folder) / "checkpoints"
    return {name: dict(load_file(folder / f"{name}.safetensors").items()) for name in ("state", "best")}


def assert_same(one, other):
    for name in one:
        assert one[name].keys() == other[name].keys()
        assert all(torch.equal(one[name][key], other[name][key]) for key in one[name]), name


@pytest.mark.parametrize(
    ("pack", "stop_at"),
    [*(("pixart", step) for step in (1, 4, 7, 13, 19)), *((pack, 7) for pack in tiny_runs.PACKS[1:]), ("mageflow", 13)],
)
def test_a_run_stopped_and_resumed_ends_in_the_same_bytes(tmp_path, pack, stop_at):
    plain = tiny_runs.settings(tmp_path / "a", pack)
    go(plain, tiny_runs.make(plain))
    broken = tiny_runs.settings(tmp_path / "b", pack)
    inputs = tiny_runs.make(broken)
    with pytest.raises(training.StoppedError, match="same command resumes"):
        go(broken, inputs, stop_at=stop_at)
    go(broken, inputs)
    assert_same(weights(plain), weights(broken))


def test_metrics_after_a_resume_have_every_step_once(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    with pytest.raises(training.StoppedError):
        go(settings, inputs, stop_at=12)
    go(settings, inputs)
    rows = list(csv.DictReader((inputs.run / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["5", "10", "15", "20"]
    assert all(float(row["val_cos"]) for row in rows)


def test_training_learns_and_the_best_checkpoint_has_the_best_figure(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=200, lr=3e-3)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    cosines = [float(r["val_cos"]) for r in csv.DictReader((inputs.run / "metrics.csv").open())]
    assert cosines[-1] > cosines[0] + 0.2
    meta = checkpoints.read_meta(inputs.run / "checkpoints" / "best.safetensors")
    assert meta["best_cos"] == pytest.approx(max(cosines), abs=1e-5)


def test_the_metric_of_the_pack_decides_which_checkpoint_is_best(tmp_path, monkeypatch):
    for pack, best in (("pixart", 20), ("llada_image", 10)):
        figures = zip([0.991, 0.992, 0.993, 0.994], [0.2, 0.6, 0.4, 0.5], strict=True)
        prepared = iter([{"cos": cos, "cos_centered": centred, "rel_mse": 0.1} for cos, centred in figures])
        monkeypatch.setattr(AdapterTask, "validate", lambda self, prepared=prepared: next(prepared))
        settings = tiny_runs.settings(tmp_path, pack)
        inputs = tiny_runs.make(settings)
        go(settings, inputs)
        assert checkpoints.read_meta(inputs.run / "trained.safetensors")["step"] == best
        shutil.rmtree(inputs.run)


def test_where_rows_share_a_large_offset_only_the_centred_cosine_tells_adapters_apart(tmp_path, monkeypatch):
    settings = tiny_runs.settings(tmp_path, "llada_image", steps=60, lr=3e-3)
    inputs = tiny_runs.make(settings)
    seen = []
    metrics = scoring.Scores.metrics
    monkeypatch.setattr(scoring.Scores, "metrics", lambda self: seen.append(metrics(self)) or seen[-1])
    go(settings, inputs)
    assert all(figures["cos"] > 0.99 for figures in seen)  # also of the untrained adapter: it says nothing
    centred = [figures["cos_centered"] for figures in seen]
    assert centred[0] < 0.3 < 0.5 < max(centred)
    assert "cos_eos" not in seen[0]
    meta = checkpoints.read_meta(inputs.run / "checkpoints" / "best.safetensors")
    assert meta["best_cos"] == meta["val"]["cos_centered"] == max(centred)
    rows = list(csv.DictReader((inputs.run / "metrics.csv").open()))
    assert [float(row["val_cos"]) for row in rows] == pytest.approx(centred, rel=1e-5)


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_the_loss_is_that_of_the_contract(tmp_path, pack):
    settings = tiny_runs.settings(tmp_path, pack, cos_weight=0.7)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False
    shard = shards.Shard(trainer.task.inputs.train[0])
    batch = tiny_runs.batch(shard, range(6), settings.adapter.queries)
    sums = trainer._gradients(batch, len(batch.target))
    figures = dict(zip(("loss", "mse", "cos"), sums / len(batch.target), strict=True))
    scale, squared, cosines = trainer.task.scale, [], []
    for number, row in enumerate(tiny_runs.read(shard)[:6]):
        alone = tiny_runs.batch(shard, [number], settings.adapter.queries)
        if trainer.task.vocabulary:
            alone = trainer.task.vocabulary.numbered(alone)
        student = (row.student.float() - scale.student_mean) / scale.student_std
        vision = None if row.vision is None else row.vision.float() / scale.vision_rms
        predicted = trainer.task.module(replace(alone, student=student, vision=vision))
        target = (row.target.float() - scale.target_mean) / scale.target_std
        squared += (predicted - target).square().mean(1).tolist()
        if pack != "llada_image":  # of raw rows
            predicted, target = predicted * scale.target_std + scale.target_mean, row.target.float()
        cosines += torch.cosine_similarity(predicted, target).tolist()
    mse, cosine = sum(squared) / len(squared), sum(cosines) / len(cosines)
    assert figures["mse"].item() == pytest.approx(mse, rel=1e-4)
    assert figures["cos"].item() == pytest.approx(cosine, abs=1e-5)
    assert figures["loss"].item() == pytest.approx(mse + 0.7 * (1 - cosine), rel=1e-4)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    before = weights(settings)
    go(settings, inputs)
    assert_same(before, weights(settings))


def test_raised_steps_train_only_the_rest_and_as_if_planned_so_from_the_start(tmp_path):
    short = tiny_runs.settings(tmp_path / "a", steps=10, decay_fraction=0.2)
    inputs = tiny_runs.make(short)
    with pytest.raises(training.StoppedError):  # in the constant part of both plans
        go(short, inputs, stop_at=7)
    longer = tiny_runs.settings(tmp_path / "a", steps=20, decay_fraction=0.2)
    go(longer, inputs)
    plain = tiny_runs.settings(tmp_path / "b", steps=20, decay_fraction=0.2)
    go(plain, tiny_runs.make(plain))
    assert_same(weights(longer), weights(plain))


def test_lowered_steps_end_the_run_at_once_with_a_validation(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=1000, val_every=500)
    inputs = tiny_runs.make(settings)
    go(settings, inputs, plan=lambda steps: 10)
    meta = checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")
    assert (meta["step"], meta["steps"]) == (10, 10)
    assert (inputs.run / "checkpoints" / "best.safetensors").exists()
    assert read_json(inputs.run / "settings" / "plan.json") == {"steps": 10}


def test_steps_lowered_to_where_training_was_stopped_count_for_the_best(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=50, val_every=30)
    inputs = tiny_runs.make(settings)
    with pytest.raises(training.StoppedError):
        go(settings, inputs, stop_at=40)
    settings.train.steps = 40
    go(settings, inputs)
    assert checkpoints.read_meta(inputs.run / "trained.safetensors")["step"] == 40


def test_settings_that_another_command_wrote_meanwhile_do_not_pass_for_those_trained_with(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)

    def plan(steps):
        config.write_stage_settings(tiny_runs.settings(tmp_path, lr=5e-4))  # such as a dry run
        return steps

    go(settings, inputs, plan)
    assert read_json(inputs.run / "settings" / "train.json")["train"]["lr"] == settings.train.lr


def test_a_plan_that_cannot_be_read_does_not_end_training(tmp_path):
    def broken(steps):
        raise TrainerError("setting `train.steps` is 'many'")

    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    go(settings, inputs, plan=broken)
    assert checkpoints.read_meta(inputs.run / "checkpoints" / "state.safetensors")["step"] == 20


def test_another_learning_rate_starts_over_and_keeps_the_old_checkpoints(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    changed = tiny_runs.settings(tmp_path, lr=5e-4)
    go(changed, inputs)
    (stale,) = inputs.run.glob("checkpoints.stale-*")
    assert (stale / "best.safetensors").exists()
    plain = tiny_runs.settings(tmp_path / "b", lr=5e-4)
    go(plain, tiny_runs.make(plain))
    assert_same(weights(changed), weights(plain))


def test_a_state_that_another_version_left_starts_over_and_is_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(training.log, "propagate", True)
    caplog.set_level("INFO", "trainer")
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    state = inputs.run / "checkpoints" / "state.safetensors"
    tensors, meta = checkpoints.load(state)
    del meta["optimizer"]
    checkpoints.save(state, tensors, meta)
    go(settings, inputs)
    assert "another version of this program" in caplog.text
    (stale,) = inputs.run.glob("checkpoints.stale-*")
    assert checkpoints.read_meta(stale / "best.safetensors")["step"]


def test_a_snapshot_request_keeps_the_step_and_changes_nothing_else(tmp_path):
    plain = tiny_runs.settings(tmp_path / "a")
    go(plain, tiny_runs.make(plain))
    asked = tiny_runs.settings(tmp_path / "b")
    inputs = tiny_runs.make(asked)
    go(asked, inputs, snapshot_at=7)
    assert checkpoints.kept_path(inputs.run / "checkpoints", 7).exists()
    assert_same(weights(plain), weights(asked))


@pytest.mark.parametrize("pack", [*tiny_runs.PACKS, "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, pack, dtype, monkeypatch):
    settings = tiny_runs.settings(tmp_path, "mageflow" if pack == "plain" else pack)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False  # equal up to f32 rounding; in bf16, up to that of bf16
    trainer.task.module.to(dtype)
    if dtype == torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    batch = tiny_runs.batch(trainer.task.train[0], range(17), settings.adapter.queries)
    size = max(student + target for student, target in zip(batch.lengths, batch.counts, strict=True))
    gradients = []
    for tokens in (10**9, 1, size, 2 * size, 5 * size):
        trainer.task.batch_tokens = tokens
        trainer._gradients(batch, len(batch.target))
        gradients.append(torch.cat([p.grad.double().flatten() for p in trainer.task.module.parameters()]))
    for other in gradients[1:]:
        assert (gradients[0] - other).norm() <= (1e-6 if dtype == torch.float32 else 1e-14) * gradients[0].norm()


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_gradients_of_the_shares_of_processes_add_up_to_those_of_the_batch(tmp_path, pack):
    settings = tiny_runs.settings(tmp_path, pack)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False
    gradients = []
    for rank, count in ((0, 1), (0, 3), (1, 3), (2, 3)):
        options = {"seed": 1, "window": 10**9, "position": 0, "size": 17, "pin": False}
        loader = Loader(trainer.task.train, settings.adapter.queries, **options, rank=rank, processes=count)
        trainer._gradients(*next(loader))
        loader.close()
        gradients.append(torch.cat([p.grad.double().flatten() for p in trainer.task.module.parameters()]))
    assert (gradients[0] - sum(gradients[1:])).norm() <= 1e-6 * gradients[0].norm()


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_out_of_memory_goes_on_with_smaller_parts_and_then_recomputed_blocks(tmp_path, pack, monkeypatch):
    settings = tiny_runs.settings(tmp_path, pack)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False
    batch = tiny_runs.batch(trainer.task.train[0], range(17), settings.adapter.queries)
    trainer._gradients(batch, len(batch.target))
    expected = torch.cat([p.grad.flatten() for p in trainer.task.module.parameters()])
    score, sizes = scoring.loss, []

    def short(adapter, scale, part, *more):
        sizes.append(len(part))
        if len(part) > 1 or not adapter.recompute:
            raise torch.OutOfMemoryError("as a GPU would")
        return score(adapter, scale, part, *more)

    monkeypatch.setattr(scoring, "loss", short)
    trainer.options = settings.train.model_copy(update={"lr": 0.0, "grad_clip": 0})
    trainer._step(batch, len(batch.target))
    found = torch.cat([p.grad.flatten() for p in trainer.task.module.parameters()])
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert sizes[-17:] == [1] * 17
    monkeypatch.setattr(scoring, "loss", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("still")))
    with pytest.raises(TrainerError, match="lower adapter"):
        trainer._step(batch, len(batch.target))


def test_compiled_blocks_give_the_same_gradients_and_resume_to_the_byte(tmp_path):
    settings = tiny_runs.settings(tmp_path / "a", compile=True)
    inputs = tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False
    batch = tiny_runs.batch(trainer.task.train[0], range(8), tiny_runs.QUERIES)
    gradients = []
    for compiled in (True, False):
        trainer.task.module.compiled = compiled
        trainer._gradients(batch, len(batch.target))
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.task.module.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
    go(settings, inputs)
    broken = tiny_runs.settings(tmp_path / "b", compile=True)
    again = tiny_runs.make(broken)
    with pytest.raises(training.StoppedError):
        go(broken, again, stop_at=7)
    go(broken, again)
    assert_same(weights(settings), weights(broken))


def test_validation_compiles_nothing_so_that_its_figures_are_those_of_evaluation(tmp_path, monkeypatch):
    settings = tiny_runs.settings(tmp_path, compile=True)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    monkeypatch.setattr(layers, "_compiled", None)
    assert trainer.validate()["cos"]


def test_training_ends_at_the_next_step_when_nothing_can_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise TrainerError("the disk is full")

    settings = tiny_runs.settings(tmp_path, steps=100000, val_every=100000, save_every=40, log_every=100000)
    inputs = tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(TrainerError, match="the disk is full"):
        trainer.run(Asked(inputs.run))
    assert 40 <= trainer.step < 80


def test_a_gradient_that_is_not_finite_ends_training_and_nothing_of_it_is_written(tmp_path, monkeypatch):
    settings = tiny_runs.settings(tmp_path, save_every=4, keep_every=3, val_every=4, log_every=100)
    inputs = tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    score = scoring.loss

    def spoilt(*args):
        found = score(*args)
        return replace(found, objective=found.objective * (math.nan if trainer.step == 12 else 1))

    monkeypatch.setattr(scoring, "loss", spoilt)
    with pytest.raises(TrainerError, match="not finite"):
        trainer.run(Asked(inputs.run))
    trainer.writer.wait()
    assert trainer.step == 15  # the first that would be written
    written = {file.stem: checkpoints.load(file) for file in trainer.folder.iterdir()}
    assert {name: meta["step"] for name, (_, meta) in written.items()} == {
        **{"state": 12, "best": written["best"][1]["step"]},
        **{f"step-{step:07d}": step for step in (3, 6, 9, 12)},
    }
    assert all(tensor.isfinite().all() for tensors, _ in written.values() for tensor in tensors.values())


def test_jobs_that_compile_nothing_do_not_wait_for_the_compiler_to_load():
    code = "import sys; from trainer import evaluation, snapshots; assert 'torch._dynamo' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(Path(training.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_without_a_compiler_training_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    torch._dynamo.reset()
    settings = tiny_runs.settings(tmp_path, "llada_image", steps=5, compile=True)
    monkeypatch.setattr(training.log, "propagate", True)
    go(settings, tiny_runs.make(settings))
    assert "train.compile: kernels cannot be made here" in caplog.text
    assert "going on without" in caplog.text
    torch._dynamo.reset()


def test_norms_biases_and_embeddings_do_not_decay(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    decayed, free = (group["params"] for group in trainer.task.optimizer.param_groups)
    names = {id(p): name for name, p in trainer.task.module.named_parameters()}
    assert all(names[id(p)].endswith("weight") and "ln_" not in names[id(p)] for p in decayed)
    assert {"query", "t5_embed.weight", "ln_out.weight", "in_proj.bias"} <= {names[id(p)] for p in free}


def test_a_damaged_shard_stops_training_is_named_and_set_aside(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    content = bytearray(inputs.train[1].read_bytes())
    content[len(content) // 2] ^= 1
    inputs.train[1].write_bytes(content)
    with pytest.raises(TrainerError, match=r"0000-01\.safetensors is damaged"):
        go(settings, inputs)
    assert not inputs.train[1].exists()


def test_only_rows_of_the_seed_table_that_occur_are_trained_and_the_others_are_kept(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    inputs = tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    occurring = {0, *(n for shard in trainer.task.train + trainer.task.val for n in shard.columns["slots"].tolist())}
    assert len(trainer.task.module.t5_embed.weight) == len(occurring) < tiny_runs.VOCABULARY
    go(settings, inputs)
    start = load_file(inputs.given["seed_table"])["table"]
    table = weights(settings)["best"]["model.t5_embed.weight"]
    changed = {n for n in range(tiny_runs.VOCABULARY) if not torch.equal(table[n], start[n])}
    trained = {0, *(n for shard in trainer.task.train for n in shard.columns["slots"].tolist())}
    assert changed == trained


@pytest.mark.parametrize("pack", ["pixart", "llada_image"])
def test_the_reference_recipe_is_that_of_the_contract(tmp_path, pack):
    settings = tiny_runs.settings(tmp_path, pack, recipe="reference", cos_weight=0.7, lr=2e-4, steps=20)
    inputs = tiny_runs.make(settings)
    trainer = tiny_runs.trainer(settings)
    trainer.task.autocast = False
    assert [group["weight_decay"] for group in trainer.task.optimizer.param_groups if group["params"]] == [0.01]
    shard = trainer.task.train[0]
    batch = tiny_runs.batch(shard, range(6), settings.adapter.queries)
    loss = trainer._gradients(batch, len(batch.target))[0] / len(batch.target)
    true = Standardization.of(trainer.task.train, settings.train.sigma_floor)
    numbered = trainer.task.vocabulary.numbered(batch) if pack == "pixart" else batch
    predicted, target = trainer.task.module(numbered.widened()), batch.target.float()
    if pack == "pixart":  # RAW
        squared = ((predicted - target) / true.target_std).square().mean()
        assert trainer.task.module.t5_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    else:  # STD
        target = true.target(target)
        squared = (predicted - target).square().mean()
    expected = squared + 0.7 * (1 - torch.cosine_similarity(predicted, target).mean())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    go(settings, inputs)
    best = inputs.run / "checkpoints" / "best.safetensors"
    weights, scale = checkpoints.unpack(checkpoints.load(best)[0])
    assert torch.allclose(scale.mean, true.target_mean)
    folded = scale.fold(weights)
    assert torch.equal(folded["in_proj.weight"], weights["in_proj.weight"])


def test_the_rate_of_the_reference_falls_to_a_tenth_along_a_cosine():
    settings = Train(lr=0.5, warmup=10, recipe="reference")
    rates = [recipe.learning_rate(step, 110, settings) for step in range(111)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[10] == pytest.approx(0.5)
    assert rates[60] == pytest.approx(0.275)
    assert rates[110] == pytest.approx(0.05)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "meta", "gpu"])
def test_a_device_that_is_not_here_is_told_in_words(device):
    with pytest.raises(TrainerError, match="use auto"):
        devices.pick(device)


def test_a_second_training_in_the_same_run_is_refused_until_the_first_is_gone(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with control.only_one(tmp_path, "train"):
            os.write(write, b"x")
            signal.pause()
        os._exit(0)
    os.read(read, 1)
    try:
        with pytest.raises(TrainerError, match="already running"), control.only_one(tmp_path, "train"):
            pass
        assert control.running(tmp_path) == ["train"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with control.only_one(tmp_path, "train"):
        pass
    assert control.running(tmp_path) == []


def test_the_rate_warms_up_stays_and_decays_to_zero():
    settings = Train(lr=1.0 - 1e-9, warmup=10, decay_fraction=0.5)
    rates = [recipe.learning_rate(step, 100, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:50] == pytest.approx([1.0] * 41)
    assert rates[99] == pytest.approx(0.02)
