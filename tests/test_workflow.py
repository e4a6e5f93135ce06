"""Whole runs with the real snakemake command line: tiny models of the real classes, PixArt's pack."""

import copy
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tiny_llada
import torch
from fake_hub import WritableHub
from safetensors.torch import load_file, save_file
from trainer import checkpoints, export, packs, probe, status
from workflow import CHECKOUT, GGUF, Project, adapter, project


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, models):
    """A finished run that tests only read."""
    made = project(tmp_path_factory.mktemp("undisturbed") / "p", models)
    made.snakemake()
    return made


@pytest.fixture
def finished(tmp_path, undisturbed):
    """A copy of a finished run that a test may change."""
    shutil.copytree(undisturbed.folder, tmp_path / "p", symlinks=True)
    return Project(tmp_path / "p", copy.deepcopy(undisturbed.settings))


def times(made):
    """Modification times of the shards."""
    return {path.name: path.read_bytes() for path in sorted(made.run.glob("shards/*/*.safetensors"))}


@pytest.mark.parametrize("pack", [name for name in packs.names() if "adapters" in packs.get(name).kinds])
def test_a_dry_run_lists_tens_of_jobs_with_their_reasons(tmp_path, pack):
    made = Project(tmp_path, {"pack": pack, "run": pack}, pack=pack)
    profile = str(CHECKOUT / "packs" / pack / "pack.yaml")
    output = made.snakemake("--dry-run", "--configfile", profile)
    assert "Train to step" in output
    assert "Missing output files" in output
    total = int(output.rsplit("total", 1)[1].split()[0])
    assert 10 <= total < 100


def test_a_run_leaves_adapter_evaluation_and_report(undisturbed):
    evaluation = undisturbed.json("eval.json")
    assert evaluation["trained_steps"] <= 40
    assert evaluation["metrics"]["roundtrip_cos"] > 0.9999
    assert (undisturbed.folder / GGUF).exists()
    assert "<html" in (undisturbed.run / "report.html").read_text()
    records = {record["id"]: record for record in undisturbed.json("materials.json")["materials"]}
    assert all(len(file["sha256"]) == 64 for record in records.values() for file in record["files"])
    assert list(undisturbed.run.glob("tensorboard/events*"))


def test_a_run_tells_how_prompts_of_other_kinds_fare(undisturbed):
    evaluation, index, counts = map(undisturbed.json, ("eval.json", "shards.json", "corpus.json"))
    assert counts["probe"] == dict.fromkeys(probe.KINDS, 40)
    assert index["probe"]["samples"] + sum(index["probe"]["skipped"].values()) == 160
    assert {kind: found["samples"] for kind, found in evaluation["probe"].items()} | {"caption": 40} == counts["probe"]
    assert all(-1 < found["cos"] < 1 and found["worst"]["text"] for found in evaluation["probe"].values())
    assert "On prompts of other kinds" in (undisturbed.run / "report.html").read_text()
    assert {stage["state"] for stage in status.read(undisturbed.run)["stages"]} == {"done"}


def test_after_a_finished_run_nothing_is_to_do(undisturbed):
    assert undisturbed.planned() == {}


def test_raised_steps_train_only_the_rest(finished):
    before = times(finished)
    finished.write(train={"steps": 60})
    assert finished.planned() == dict.fromkeys(("train", "export", "evaluate", "report", "card", "all"), 1)
    output = finished.snakemake()
    assert "resuming at step 40 of 60" in output
    assert finished.json("eval.json")["planned_steps"] in (40, 60)
    assert times(finished) == before
    assert finished.planned() == {}


def test_lowered_steps_end_a_running_training_at_once(tmp_path, models):
    made = project(tmp_path / "p", models, steps=100000)
    process = made.start()
    state = made.run / "checkpoints" / "state.safetensors"
    deadline = time.monotonic() + 300
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    made.write(train={"steps": 10})
    output = process.output()
    assert process.returncode == 0, output[-4000:]
    assert "train.steps is now 10" in output
    assert (made.run / "eval.json").exists()
    assert made.planned() == {}


def test_another_learning_rate_retrains_and_rebuilds_no_shard(finished):
    before = times(finished)
    finished.write(train={"lr": 1e-3})
    assert "precompute_block" not in finished.planned()
    assert "moved to" in finished.snakemake()
    assert times(finished) == before
    assert list(finished.run.glob("checkpoints.stale-*"))


def test_one_changed_prompt_rebuilds_only_its_shards(finished):
    before = times(finished)
    file = finished.folder / "one.txt"
    file.write_text(file.read_text() + "a copper telescope beside seven sleeping foxes at noon\n")
    finished.snakemake()
    changed = [name for name, content in times(finished).items() if content != before[name]]
    assert len(changed) == 1
    assert finished.planned() == {}


def test_touching_files_redoes_nothing(finished):
    for path in [finished.folder / "one.txt", finished.folder / "pack.yaml", *finished.run.glob("settings/*.json")]:
        path.touch()
    assert finished.planned() == {}


def test_a_model_replaced_in_its_place_is_noticed(finished, models):
    student = Path(models["student"])
    content, stat = student.read_bytes(), student.stat()
    try:
        student.write_bytes(content[:-4] + b"\0\0\0\0")
        assert {"material", "precompute_block", "train", "export"} <= finished.planned().keys()
    finally:
        student.write_bytes(content)
        os.utime(student, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_damaged_shard_is_named_and_healed_by_the_next_run(finished):
    good = adapter(finished)
    shard = finished.run / "shards" / "train" / "0001-01.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 4
    shard.write_bytes(content)
    finished.write(train={"lr": 1.9e-3})  # so that training reads the shards again
    output = finished.snakemake(fails=True)
    assert "0001-01.safetensors is damaged" in output
    assert "Traceback" not in output
    finished.write(train={"lr": 2e-3})
    finished.snakemake()
    assert adapter(finished) == good


def test_shards_of_a_synthetic_teacher_are_never_taken_for_real_ones(tmp_path, undisturbed, models):
    made = project(tmp_path / "p", models)
    made.write(precompute={"teacher": "synthetic"})
    made.snakemake()
    assert (made.folder / "runs" / "pig_t5_adapter-synthetic-f16.gguf").exists()
    made.write(precompute={"teacher": "real"})
    made.snakemake()
    assert adapter(made) == adapter(undisturbed)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"train": {"stepz": 5}}, "did you mean `train.steps`?"),
        ({"adapter": {"student_dim": 1024}}, "1024"),
        ({"corpus": {"files": ["one.txt", "absent.txt"]}}, "absent.txt"),
    ],
)
def test_a_mistake_is_told_in_words_and_before_any_model_is_loaded(tmp_path, models, groups, words):
    made = project(tmp_path / "p", models)
    made.write(**groups)
    output = made.snakemake(fails=True)
    assert words in output
    assert "Traceback" not in output
    assert not list(made.run.glob("shards/*/*.safetensors"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB; call it with another size to change that."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(place)], capture_output=True, check=False).returncode == 0

    if not mount("-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        pytest.skip("mounting a small file system needs root")
    yield place, lambda size: mount("-o", f"remount,size={size}")
    subprocess.run(["umount", "--lazy", str(place)], check=False)


def test_a_full_disk_is_told_in_words_and_more_room_heals_it(tmp_path, models, undisturbed, small_disk):
    place, resize = small_disk
    made = project(tmp_path / "p", models)
    made.settings["runs_dir"] = str(place)
    made.write()
    output = made.snakemake(fails=True)
    assert "is full" in output
    assert "Traceback" not in output
    assert resize("200m")
    made.snakemake()
    assert adapter(made, place / "pig_t5_adapter-f16.gguf") == adapter(undisturbed)


@pytest.mark.parametrize("seed", [1])
def test_a_run_killed_at_random_moments_ends_in_the_same_bytes(tmp_path, models, undisturbed, seed):
    made = project(tmp_path / "p", models)
    chance = random.Random(seed)
    for _ in range(3):
        process = made.start()
        time.sleep(chance.uniform(6, 20))
        if process.poll() is not None:
            break
        made.kill(process)
    made.snakemake()
    assert adapter(made) == adapter(undisturbed)
    best = "checkpoints/best.safetensors"
    one, other = load_file(made.run / best), load_file(undisturbed.run / best)
    assert all((one[name] == other[name]).all() for name in other)


def test_llada_image_runs_from_prompts_to_its_two_files_also_when_it_is_killed(tmp_path, models):
    snapshot = tiny_llada.llada_snapshot(tmp_path / "snapshot", queries=40, projection_dim=64)
    (snapshot / "sigvq").mkdir()
    sigvq = snapshot / "sigvq" / "diffusion_pytorch_model.safetensors"
    save_file({"a": torch.randn(4, 3).bfloat16(), "b": torch.ones(3)}, sigvq)
    paths = {name: models[name] for name in ("student", "tokenizer")}

    def run(name):
        made = project(tmp_path / name, paths | {"teacher": str(snapshot), "sigvq": str(snapshot)}, steps=60)
        made.pack = made.settings["pack"] = "llada_image"
        made.write()
        return made

    killed, plain = run("killed"), run("plain")
    assert not {"seed_table"} & killed.planned().keys()
    for file in ("shards/train/0000.json", "checkpoints/state.safetensors"):
        process = killed.start()
        deadline = time.monotonic() + 300
        while not (killed.run / file).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        killed.kill(process)
    for made in (killed, plain):
        made.snakemake()
        assert made.planned() == {}
    files = ["runs/pig_llada_adapter-f16.gguf", "runs/pig_llada_adapter_sigvq-f16.gguf"]
    for file in files:
        assert (killed.folder / file).read_bytes() == (plain.folder / file).read_bytes()
    adapter, companion = (export.read_arrays(plain.folder / file) for file in files)
    assert {name: array.shape for name, array in companion.items()} == {"a": (4, 3), "b": (3,)}
    assert adapter["adapter.query"].shape == (40, 64)
    assert adapter["adapter.out_proj.weight"].shape == (64, 64)
    assert not any("t5_embed" in name for name in adapter)
    result = plain.json("eval.json")
    assert (result["kind"], result["synthetic"], result["metrics"]["baseline_cos"]) == ("resampler", False, 0)
    assert result["metrics"]["cos_centered"] > 0.2
    assert result["metrics"]["roundtrip_cos"] > 0.9999
    assert (plain.run / "report.html").exists()
    plain.write(export={"companion": False})
    assert "companion" not in plain.planned()


def test_a_second_workflow_can_snapshot_while_training_runs(tmp_path, models):
    made = project(tmp_path / "p", models, steps=100000)
    process = made.start("--retries", "1")
    deadline = time.monotonic() + 300
    while not (made.run / "checkpoints" / "state.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    made.snakemake("--nolock", "snapshot")
    (entry,) = made.json("snapshots.json")["snapshots"]
    assert entry["while_training"]
    assert made.planned("--nolock", "snapshot") == {"snapshot": 1}  # and again, as often as one likes
    assert (made.folder / entry["path"]).exists()
    assert process.poll() is None
    stopped = made.control("stop")
    output = process.output()
    assert "stopped: train" in stopped
    assert "stopped at step" in output
    assert "Trying to restart" in output  # which is for faults: that one stopped, too
    assert not (made.folder / GGUF).exists()
    assert "nothing runs" in made.control("stop")
    step = checkpoints.read_meta(made.run / "checkpoints" / "state.safetensors")["step"]
    made.write(train={"steps": step})
    assert f"resuming at step {step} of {step}" in made.snakemake()
    assert (made.folder / GGUF).exists()


def test_a_finished_run_is_published_with_its_card_and_its_token_stays_untold(finished, monkeypatch):
    hub = WritableHub("hf_do_not_tell_anybody")
    for name, value in {"HF_TOKEN": hub.token, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    target = ("publish", "--config", "publish={repository: me/my-adapter}")
    assert finished.planned(*target) == {"publish": 1}
    output = finished.snakemake(*target, online=True)
    assert f"published: {hub.url}/me/my-adapter/commit/" in output
    assert hub.files == {
        "README.md": (finished.run / "README.md").read_bytes(),
        "pig_t5_adapter-f16.gguf": (finished.folder / GGUF).read_bytes(),
    }
    files = [file for file in finished.folder.rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [file for file in files if hub.token.encode() in file.read_bytes()]
    assert hub.token not in output
    assert finished.planned() == {}


def test_two_runs_in_one_checkout_at_once_do_not_disturb_each_other(finished, undisturbed):
    finished.write(train={"steps": 100000})
    training = finished.start()
    other = copy.deepcopy(undisturbed.settings) | {"run": "other", "export": {"name": "other_adapter"}}
    made = Project(finished.folder, other, settings_file="other.yaml")
    made.snakemake()
    assert adapter(made, made.folder / "runs" / "other_adapter-f16.gguf") == adapter(undisturbed)
    made.control("stop")
    assert training.poll() is None
    assert "train" in finished.control("stop")
    output = training.output()
    assert "stopped at step" in output
