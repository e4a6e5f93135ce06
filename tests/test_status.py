"""Watching a run: the status agrees with the folder at any moment, of a run of any kind, and changes nothing in it."""

import json
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import finished_run
import pytest
import tiny_models
from trainer import commands, config, job, status
from trainer.adapter_needs import AdapterDoctor
from trainer.config import Settings
from trainer.errors import TrainerError
from workflow import CHECKOUT, Project, prompts

SCRIPT = CHECKOUT / "scripts" / "status.py"
STAGE = {"name", "state", "done", "total", "unit", "rate", "eta_s", "used_bytes", "needed_bytes"}
JOB = {"name", "stage", "pid", "host", "alive", "started", "updated", "what", "done", "total", "unit", "rate", "eta_s"}


def stages(found):
    return {stage["name"]: stage for stage in found["stages"]}


def checked(run):
    """A status, after what holds of any: its names, and numbers that JSON can hold."""
    found = status.read(run)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found.keys() == {
        *("version", "run", "pack", "time", "state", "stages", "jobs", "metrics", "disk", "problems", "notes"),
    }
    assert [stage["name"] for stage in found["stages"]] == list(status.STAGES)
    assert all(stage.keys() == STAGE for stage in found["stages"])
    assert all(entry.keys() == JOB for entry in found["jobs"])
    assert found["metrics"].keys() == {"train", "val", "evaluation"}
    assert all(entry.keys() == {"job", "stage", "time", "kind", "message"} for entry in found["problems"])
    assert status.text(found)
    return found


def disk(*paths):
    """Bytes of all files below, links left out."""
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


# -- a real run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A run of a synthetic teacher with tiny models, long enough to be stopped."""
    tokenizer = tiny_models.qwen2_tokenizer(tmp_path / "tokenizer")
    student = tiny_models.student_gguf(tmp_path / "pig_clip-f16.gguf")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "prompts.txt").write_text("\n".join(prompts(220)))
    return Project(
        tmp_path / "p",
        {
            "pack": "llada_image",
            "run": "tiny",
            "materials": {"paths": {"student": str(student), "tokenizer": str(tokenizer)}},
            "corpus": {"presets": [], "files": ["prompts.txt"], "n_train": 170, "n_val": 30, "val_fraction": 0.15},
            "precompute": {"teacher": "synthetic", "shard_size": 50, "device": "cpu"},
            "adapter": {"width": 64, "depth": 1, "student_dim": 64, "teacher_dim": 64, "queries": 40},
            "train": {"steps": 100_000, "batch_size": 8, "warmup": 4, "val_every": 20, "save_every": 10, "log_every": 2}
            | {"keep_every": 0, "device": "cpu"},
        },
        pack="llada_image",
    )


def follow(made, until):
    """Look at a running workflow at random moments until a status fulfils `until`; gives all that was seen."""
    chance, seen, deadline = random.Random(1), [], time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.05, 0.4))
        if not made.run.exists():
            continue
        before = len(list(made.run.glob("shards/*/????-??.safetensors"))), disk(made.run)
        found = checked(made.run)
        after = len(list(made.run.glob("shards/*/????-??.safetensors"))), disk(made.run)
        assert before[0] <= stages(found)["precompute"]["done"] <= after[0]
        if before[1] == after[1]:
            assert found["disk"]["used_bytes"] == after[1] + disk(*made.run.parent.glob("*.gguf"))
        seen.append(found)
        if until(found):
            return seen
    raise AssertionError(status.text(seen[-1]))


def test_status_and_doctor_agree_with_a_run_from_its_start_over_a_stop_and_a_kill_to_its_end(project, monkeypatch):
    output = project.snakemake("doctor")
    assert "ok       disk" in output
    assert "PROBLEM" not in output
    monkeypatch.chdir(project.folder)
    doctors = AdapterDoctor(config.load(project.settings), 1 << 40)
    assert all(check.level == "ok" for look in (doctors.materials, doctors.memory) for check in look())
    promised = {name: size * 1e9 for name, size in doctors.measured()[0].stages.items()}

    process = project.start()
    seen = follow(project, lambda found: found["metrics"]["val"] and found["jobs"] and found["jobs"][0]["rate"])
    planned = next(found for found in seen if stages(found)["corpus"]["state"] == "done")
    training = seen[-1]
    recorded = commands.read(project.run)
    assert [sys.executable, "-m", "snakemake", *recorded.arguments] == project.command()
    assert (recorded.folder, recorded.configfiles[-1]) == (str(project.folder), str(project.folder / "pack.yaml"))
    (entry,) = training["jobs"]
    assert (entry["name"], entry["host"], entry["alive"]) == ("train", socket.gethostname(), True)
    assert training["state"] == stages(training)["train"]["state"] == "running"
    assert stages(training)["train"]["eta_s"] == pytest.approx((100_000 - entry["done"]) / entry["rate"])
    assert training["metrics"]["train"]["step"] >= 20
    assert any(job["what"] for found in seen for job in found["jobs"] if job["stage"] == "train")

    project.control("stop")
    process.wait(300)
    stopped = checked(project.run)
    assert (stopped["state"], stopped["jobs"]) == ("stopped", [])
    (problem,) = stopped["problems"]
    assert (problem["job"], problem["kind"]) == ("train", "stopped")
    assert f"step {stages(stopped)['train']['done']}" in problem["message"]

    process = project.start()
    (pid,) = {job["pid"] for job in follow(project, lambda found: found["jobs"])[-1]["jobs"]}
    project.kill(process)
    killed = checked(project.run)
    assert killed["problems"][0]["kind"] == "killed"
    assert str(pid) in killed["problems"][0]["message"]
    assert stages(killed)["train"]["state"] == "failed"

    project.write(train={"steps": stages(killed)["train"]["done"] + 10})
    project.snakemake()
    end = checked(project.run)
    assert (end["state"], end["jobs"], end["problems"]) == ("finished", [], [])
    assert all(stage["done"] == stage["total"] for stage in end["stages"])
    assert end["disk"]["needed_bytes"] == 0
    assert end["metrics"]["evaluation"]["roundtrip_cos"] > 0.99
    left = stages(planned)
    for name in ("precompute", "train", "export"):
        made = stages(end)[name]["used_bytes"]
        assert promised[name] == pytest.approx(made, rel=0.1)
        if name != "precompute":  # for which status takes the pack's average prompt, and doctor these
            assert left[name]["used_bytes"] + left[name]["needed_bytes"] == pytest.approx(made, rel=0.3)


# -- runs of all kinds -------------------------------------------------------------------------------------------------


def made_run(tmp_path, **groups):
    """A finished run as the stages leave it, and its settings file."""
    folder, settings = finished_run.build(tmp_path, **groups)
    config.write_stage_settings(settings)
    return folder, settings


def announced(folder, name, **values):
    control = folder / "control"
    control.mkdir(exist_ok=True)
    values = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time(), "updated": time.time()} | values
    (control / f"{name}.progress.json").write_text(json.dumps(values))


def test_a_folder_that_is_missing_is_one_sentence(tmp_path):
    ran = subprocess.run([sys.executable, SCRIPT, tmp_path / "none"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert len(ran.stderr.splitlines()) == 1


def test_a_call_takes_well_under_a_second_and_loads_nothing_heavy(tmp_path):
    folder, _ = made_run(tmp_path)
    code = f"import sys; sys.argv = ['status', {str(folder)!r}]; import status; status.main()"
    code += "; assert not {'torch', 'numpy', 'transformers', 'pandas'} & sys.modules.keys()"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, check=True, capture_output=True)
    assert time.monotonic() - start < 2  # on a busy machine; alone it takes 0.2


@pytest.mark.parametrize("settings", [None, "{}", '{"settings": {"pack": "of tomorrow"}, "folder": "/"}', "[1"])
def test_a_run_without_settings_or_of_another_version_is_told_with_what_is_known(tmp_path, settings):
    folder, _ = finished_run.build(tmp_path)
    if settings is not None:
        (folder / "settings").mkdir()
        (folder / "settings" / "run.json").write_text(settings)
    found = checked(folder)
    assert found["notes"]
    assert found["pack"] is None
    assert stages(found)["corpus"]["done"] == 3636 + 36 + 404 + 4 + 159
    assert found["disk"]["needed_bytes"] is None


def test_a_fresh_run_waits_with_everything_to_do(tmp_path):
    settings = config.load({"runs_dir": str(tmp_path)})
    config.write_stage_settings(settings)
    found = checked(tmp_path / "demo")
    assert found["state"] == "waiting"
    assert {stage["done"] for stage in found["stages"]} == {0}
    assert stages(found)["train"]["total"] == 20000
    assert stages(found)["precompute"]["total"] == 4 * (settings.blocks("train") + settings.blocks("val") + 1)
    assert stages(found)["precompute"]["needed_bytes"] > 1e9


def test_looking_at_a_run_writes_nothing_and_takes_no_lock(tmp_path):
    folder, _ = made_run(tmp_path)
    announced(folder, "train")
    (folder / "control" / "train.lock").touch()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    checked(folder)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_value_that_is_no_number_is_null(tmp_path):
    folder, _ = made_run(tmp_path)
    rows = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join([*rows, "9000,1.5e9,nan,inf,,0.1,,,nan,"]) + "\n")
    announced(folder, "train", rate=math.inf, done=math.nan, total=7, unit="steps", what="training")
    found = checked(folder)
    assert found["metrics"]["train"] | {"lr": None, "time": None} == dict.fromkeys(
        ("time", "loss", "mse", "cos", "lr", "grad_norm", "prompts_per_s")
    ) | {"step": 9000}


def test_a_process_that_is_gone_was_killed_and_one_on_another_host_is_not_known(tmp_path):
    folder, _ = made_run(tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    announced(folder, "corpus", pid=gone.pid)
    announced(folder, "precompute-train-0001", host="node7", pid=1)
    announced(folder, "precompute-train-0002", host="node7", pid=1, what="teacher", updated=time.time() - 4000)
    announced(folder, "evaluate", started=time.time() - 10**8)  # this process has got the number of another one
    found = {entry["name"]: entry["alive"] for entry in checked(folder)["jobs"]}
    assert found == {"corpus": False, "precompute-train-0001": None, "precompute-train-0002": False, "evaluate": False}
    assert "corpus" not in [p["job"] for p in checked(folder)["problems"]]  # it is there: made again since
    assert [p["job"] for p in checked(folder)["problems"]] == ["evaluate", "precompute-train-0002"]


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        ("12:00:01  error: the disk is full", "error", "the disk is full"),
        ("12:00:01  error: stopped at step 3 as asked", "stopped", "stopped at step 3 as asked"),
        ("12:00:01  interrupted; the same command", "stopped", "interrupted; the same command"),
        ("12:00:01  this is a bug of\nTraceback\nKeyError: 'x'\n", "bug", "KeyError: 'x' (a bug"),
        ("12:00:01  error: old\n12:00:02  trained to step 9", None, None),
        ("", None, None),
    ],
)
def test_the_error_that_a_log_ends_with_is_told_until_the_job_succeeds(tmp_path, lines, kind, message):
    folder, _ = made_run(tmp_path)
    log = folder / "logs" / "train.log"
    log.parent.mkdir()
    log.write_text(lines)
    problems = checked(folder)["problems"]
    assert [p["kind"] for p in problems] == ([kind] if kind else [])
    assert all(p["message"].startswith(message) for p in problems)
    benchmark = folder / "benchmarks" / "train.tsv"
    os.utime(log, (time.time() - 20, time.time() - 20))
    benchmark.touch()
    assert checked(folder)["problems"] == []


def test_the_time_left_for_blocks_is_what_the_ones_before_took(tmp_path):
    settings = Settings(
        runs_dir=str(tmp_path), precompute={"shard_size": 100, "block_shards": 2}, corpus={"n_val": 200}
    )
    settings.corpus.n_train = 800  # 4 blocks and 1, and that of probe
    config.write_stage_settings(settings)
    folder = tmp_path / "demo"
    (folder / "shards" / "train" / "0001.partial").mkdir(parents=True)
    (folder / "shards" / "train" / "of-others.safetensors").write_bytes(bytes(9))
    for name in ("0000.json", "0000-00.safetensors", "0000-01.safetensors", "0001-00.safetensors"):
        (folder / "shards" / "train" / name).write_bytes(bytes(1000))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "precompute-train-0000.tsv").write_text("s\th:m:s\n100.0\t0:01:40\n")
    announced(
        folder, "precompute-train-0001", started=time.time() - 30, what="student on cpu", rate=10, done=5, total=9
    )
    stage = stages(checked(folder))["precompute"]
    assert (stage["done"], stage["total"], stage["state"]) == (3, 12, "running")
    assert stage["eta_s"] == pytest.approx(70 + 4 * 100, abs=1)
    assert stage["rate"] == pytest.approx(2 / 100)
    assert stage["needed_bytes"] == pytest.approx(1160 * 10 - stage["used_bytes"] + 4 * 30522 * 1024, rel=0.01)


def test_watching_as_json_is_an_object_a_line_until_it_is_interrupted(tmp_path):
    folder, _ = made_run(tmp_path)
    command = [sys.executable, SCRIPT, folder, "--json", "--watch", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    assert lines[1]["time"] > lines[0]["time"]
    text = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in text
    assert "train" in text


# -- what a job tells --------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet():
    """`job` adds handlers to the log of this process."""
    log = logging.getLogger("trainer")
    before, propagate = list(log.handlers), log.propagate
    yield
    log.handlers, log.propagate = before, propagate


def test_a_job_says_how_far_it_is_and_nothing_once_it_has_ended(tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(job._Announcement, "EVERY", 0.0)
    file = tmp_path / "control" / "corpus.progress.json"

    def work():
        assert json.loads(file.read_text())["pid"] == os.getpid()
        progress = job.Progress("reading", 8, "files")
        progress.skip(2)
        progress.update(2)
        told = json.loads(file.read_text())
        assert (told["what"], told["done"], told["total"], told["unit"]) == ("reading", 4, 8, "files")
        assert told["rate"] > 0
        raise TrainerError("no")

    with pytest.raises(SystemExit), job.job(tmp_path / "logs" / "corpus.log"):
        work()
    assert not file.exists()
    job.announce(done=1)  # outside of a job it goes nowhere
    assert not file.exists()


def test_telling_is_cheap_and_never_what_a_job_fails_for(tmp_path, quiet):
    with job.job(tmp_path / "logs" / "train.log"):
        file = tmp_path / "control" / "train.progress.json"
        for step in range(1000):
            job.announce(done=step)
        assert json.loads(file.read_text())["done"] == 0  # not again within two seconds
        file.unlink()
        file.parent.rmdir()
        Path(file.parent).write_text("in the way")
        job._announcement.last = -10
        job.announce(done=1)
