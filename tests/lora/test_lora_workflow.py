"""Whole runs of every family with the real snakemake command line, on tiny random pipelines of the real classes."""

import copy
import json
import re
import shutil
import time
from pathlib import Path

import diffusers
import pytest
import tiny_pictures
import torch
from tiny_lora_runs import FAMILIES, base
from trainer.files import sha256
from trainer.lora import doctor, evaluation, families, ladder
from trainer.lora.evaluation import Shot
from workflow import SUBJECTS, Project

PICTURES = 4


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


def pictures(folder: Path, count: int = PICTURES) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        save(folder, number)
        (folder / f"{number}.txt").write_text(f"a sks {SUBJECTS[number]}")
    return folder


def save(folder: Path, number: int, seed: int | None = None) -> None:
    content = tiny_pictures.encoded(tiny_pictures.picture(number if seed is None else seed, (80, 72)))
    (folder / f"{number}.png").write_bytes(content)


def project(folder: Path, family: str, base: Path, shown: Path, **train) -> Project:
    """A run of a pack with a job a split."""
    train = {"steps": 100, "batch_size": 1, "lr": 2e-3, "warmup": 2, "decay_fraction": 0, "weight_decay": 0} | train
    return Project(
        folder,
        {
            "pack": f"{family}_lora",
            "run": "tiny",
            "pictures": {"folder": str(shown), "resolution": 64, "min_side": 64},
            "lora": {"base": str(base), "rank": 8},
            "precompute": {"device": "cpu", "shard_size": 8, "block_shards": 1},
            "train": {"device": "cpu", "log_every": 5, "val_every": 25, "save_every": 10} | train,
            "evaluate": {"device": "cpu", "steps": 4, "guidance": 1, "seeds": [0]},
        },
        pack=f"{family}_lora",
        options=("--cores", "1"),
    )


def exported(made: Project) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted((made.folder / "runs").iterdir()) if path.is_file()}


def wait(made: Project, process, there) -> None:
    deadline = time.monotonic() + 300
    while not there() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.output()[-4000:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_one_that_is_killed_twice_end_in_the_same_files_that_diffusers_loads(tmp_path, bases, family):
    shown, its = pictures(tmp_path / "in"), families.get(family)
    plain, killed = (project(tmp_path / name, family, base(bases, family), shown) for name in ("plain", "killed"))
    assert {"corpus": 1, "precompute_block": 3, "train": 1, "export": 1}.items() <= killed.planned().items()
    whole = plain.start()
    shards, state = killed.run / "shards", killed.run / "checkpoints" / "state.safetensors"
    process = killed.start(f"runs/my_{family}_lora.safetensors")
    wait(killed, process, lambda: list(shards.glob("*/*.safetensors")))
    assert not (killed.run / "shards.json").exists()
    killed.kill(process)
    process = killed.start(f"runs/my_{family}_lora.safetensors")
    wait(killed, process, state.exists)
    assert not (killed.run / "trained.safetensors").exists()
    killed.kill(process)
    assert "resuming at step" in killed.snakemake(f"runs/my_{family}_lora.safetensors")
    output = whole.output(300)
    assert whole.returncode == 0, output[-6000:]
    assert plain.planned() == {}
    assert exported(plain) == exported(killed)
    assert len(exported(plain)) == 4

    found = plain.json("eval.json")
    assert ladder.failures(found["ladder"]) == []
    names = ["inert", "compare", "weights", "conditions", "1", "20", "100"]
    assert [rung["name"] for rung in found["ladder"]["rungs"]] == names
    page = (plain.run / "report.html").read_text()
    assert "all of them passed" in page
    assert all(f"<h3>{steps} steps" in page for steps in names[4:])
    answers = doctor.answers(doctor.read(plain.run))
    assert [it.words for it in answers if it.verdict != "yes"] == []

    pipeline = getattr(diffusers, its.pipeline).from_pretrained(base(bases, family), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 4, "height": 64, "width": 64}
    options["true_cfg_scale" if family == "qwen_image" else "guidance_scale"] = 1.0
    shot = Shot("a sks fox", 0)
    before = evaluation.draw(pipeline, shot, options)
    pipeline.load_lora_weights(str(plain.folder / f"runs/my_{family}_lora.safetensors"))
    after = evaluation.draw(pipeline, shot, options)
    assert torch.isfinite(torch.from_numpy(after)).all()
    assert abs(after - before).mean() > 2 / 255


SHARDS = "runs/tiny/shards.json"


class Shards:
    """The shards of a run, and what jobs said since that was last asked."""

    def __init__(self, made: Project) -> None:
        self.made, self.read = made, {}

    def said(self) -> str:
        """What jobs of precompute have logged since."""
        found = ""
        for path in sorted(self.made.run.glob("logs/precompute-*.log")):
            text, before = path.read_text(), self.read.get(path, "")
            found += text.removeprefix(before)
            self.read[path] = text
        return found

    def encoded(self) -> dict[str, int]:
        """How many were encoded since, by what they are."""
        found = {"pictures": 0, "captions": 0}
        for count, unit in re.findall(r" on cpu: (\d+)/\d+ (\w+) ", self.said()):
            found[unit] += int(count)
        return found

    def bytes(self) -> dict[str, str]:
        return {path.name: sha256(path) for path in self.made.run.glob("shards/*/*.safetensors")}

    def rows(self) -> dict[str, tuple[str, str]]:
        """Caption and its id by picture."""
        lines = (self.made.run / "corpus" / "train.jsonl").read_text().splitlines()
        return {row["id"]: (row["text"], row["text_id"]) for row in map(json.loads, lines)}


def test_only_what_shows_something_else_is_encoded_again(tmp_path, bases):
    shown = pictures(tmp_path / "in")
    made = project(tmp_path / "p", "flux", base(bases, "flux"), shown)
    made.snakemake(SHARDS)
    shards = Shards(made)
    assert shards.encoded() == {"pictures": PICTURES, "captions": PICTURES + 1}  # val has the same pictures

    rows = shards.rows()
    save(shown, 2, seed=99)
    made.snakemake(SHARDS)
    assert shards.encoded() == {"pictures": 1, "captions": 0}
    assert len(shards.rows().keys() & rows.keys()) == PICTURES - 1

    rows, before = shards.rows(), shards.bytes()
    for end in (".png", ".txt"):
        (shown / f"1{end}").rename(shown / f"another name{end}")
    made.snakemake(SHARDS)
    assert shards.encoded() == {"pictures": 0, "captions": 0}
    assert (shards.rows(), shards.bytes()) == (rows, before)

    one, other = shown / "0.txt", shown / "3.txt"
    texts = one.read_text(), other.read_text()
    one.write_text(texts[1])
    other.write_text(texts[0])
    assert "train" in made.planned()
    made.snakemake(SHARDS)
    assert shards.encoded() == {"pictures": 0, "captions": 0}
    assert shards.bytes() == before
    changed = [id for id, row in shards.rows().items() if row != rows[id]]
    assert len(changed) == 2
    assert {shards.rows()[id][0] for id in changed} == set(texts)
    assert made.planned(SHARDS) == {}


def test_a_rung_is_trained_to_and_judged_and_training_goes_on_to_the_same_bytes(tmp_path, bases):
    shown, trained = pictures(tmp_path / "in"), "runs/tiny/trained.safetensors"
    made = project(tmp_path / "p", "z_image", base(bases, "z_image"), shown, steps=24, save_every=24)
    made.snakemake(SHARDS)
    shutil.copytree(made.folder, tmp_path / "plain", symlinks=True)
    plain = Project(tmp_path / "plain", copy.deepcopy(made.settings), made.pack, made.options)

    assert "20 steps: all 6 rungs are passed" in made.snakemake("ladder_20")
    assert not (made.folder / trained).exists()
    graded = made.json("ladder.json")
    assert (graded["steps"], [rung["name"] for rung in graded["rungs"]][-2:]) == (20, ["1", "20"])
    output = made.snakemake("ladder_100", fails=True)
    assert "train.steps is 24, and training ends before the rung of 100 steps" in output
    assert "resuming at step 20 of 24" in made.snakemake(trained)
    plain.snakemake(trained)
    assert (made.folder / trained).read_bytes() == (plain.folder / trained).read_bytes()

    metrics = made.run / "metrics.csv"  # a rung that is behind is judged again, by what is there
    lines = [line.split(",") for line in metrics.read_text().splitlines()]
    lines[3][lines[0].index("grad_norm")] = "1000"
    metrics.write_text("".join(",".join(line) + "\n" for line in lines))
    output = made.snakemake("ladder_20", fails=True)
    assert re.search(r"is not passed: 20: largest gradient norm is \d{3,}\.\d+, and should be <= 10 \(", output)
    assert "Traceback" not in output
    assert made.planned(trained) == {}
