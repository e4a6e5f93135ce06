"""LoRA packs in the workflow: plans of all, the demo from nothing to its files, what is refused before it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from trainer import config, packs, publishing, status
from trainer.card import write_card
from trainer.errors import TrainerError
from trainer.files import sha256, write_json
from trainer.lora import doctor as lora_doctor
from trainer.lora import verdict
from trainer.report import write_report
from workflow import CHECKOUT, Project

FAMILIES = ["sdxl_lora", "flux_lora", "qwen_image_lora", "z_image_lora"]


def project(folder, pack, **groups):
    """A pack as it ships, with other settings."""
    shipped = yaml.safe_load((CHECKOUT / "packs" / pack / "pack.yaml").read_text())
    made = Project(folder, shipped | {"run": "tiny"}, pack=pack)
    made.write(**groups)
    return made


def pictures(folder, count):
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (96, 64), (number, 9, 9)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return str(folder)


@pytest.mark.parametrize("pack", FAMILIES)
def test_the_plan_of_a_family_lists_tens_of_jobs_by_stage(tmp_path, pack):
    made = project(tmp_path / "p", pack, pictures={"folder": pictures(tmp_path / "in", 12)})
    made.write(precompute={"shard_size": 1, "block_shards": 1})
    output = made.snakemake("--dry-run")
    assert 40 <= int(output.rsplit("total", 1)[1].split()[0]) < 100
    plan = output.rsplit("by stage:\n", 1)[1].splitlines()
    told = {line.split()[0]: int(line.split()[1]) for line in plan if line.startswith("  ")}
    assert told == {
        "materials": 2,
        "corpus": 1,
        "precompute": 16 + 2 + 16 + 1,  # pictures, those of val, captions and the empty one, the index
        "train": 1,
        "export": 1,
        "evaluate": 1,
        "report": 2,
    }
    assert packs.get(pack).splits == ("train", "val", "text")


@pytest.mark.parametrize(
    ("pack", "groups", "words"),
    [
        ("sdxl_lora", {}, "set pictures.folder to their folder"),
        ("sdxl_lora", {"pictures": {"folder": "nowhere"}}, "correct its path in pictures.folder"),
        ("z_image_lora", {"lora": {"base_precision": "f16"}}, "Z-Image needs bf16"),
        ("flux_lora", {"lora": {"base": "city96/FLUX.1-dev-gguf"}}, "is a GGUF model"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence_before_anything_is_planned(tmp_path, pack, groups, words):
    output = project(tmp_path / "p", pack, **groups).snakemake("--dry-run", fails=True)
    assert words in output
    assert "Traceback" not in output
    assert "Job stats" not in output


def test_a_word_is_said_of_other_names_and_of_a_distilled_base(tmp_path):
    folder = pictures(tmp_path / "in", 2)
    made = project(tmp_path / "p", "z_image_lora", pictures={"folder": folder}, train={"max_steps": 30})
    made.write(lora={"base": "Tongyi-MAI/Z-Image-Turbo"})
    output = made.snakemake("--dry-run")
    assert "`train.steps` is" not in output
    assert "`train.max_steps` is left aside for `train.steps`" in output  # the pack's file has its own name
    assert output.count("is distilled to a few steps") == 1
    del made.settings["train"]["steps"]
    made.write()
    output = made.snakemake("--dry-run")
    assert "`train.max_steps` is taken as `train.steps`" in output
    assert "Train to step 30" in output


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, trained and exported in a few steps."""
    made = project(
        tmp_path_factory.mktemp("demo") / "p",
        "lora_demo",
        train={"steps": 20, "val_every": 10, "save_every": 10, "keep_every": 10, "device": "cpu"},
        precompute={"device": "cpu"},
    )
    made.snakemake("runs/lora_demo.safetensors")
    return made


def test_the_demo_goes_from_nothing_to_its_files_without_a_network(demo):
    names = {path.name for path in (demo.folder / "runs").iterdir() if path.is_file()}
    assert names == {f"lora_demo{end}" for end in (".safetensors", "-comfyui.safetensors", ".gguf", ".json")}
    about = json.loads((demo.folder / "runs" / "lora_demo.json").read_text())
    assert (about["family"], about["steps"], about["run"]) == ("z_image", 20, "tiny")
    index = demo.json("shards.json")
    assert {split: index[split]["samples"] for split in ("train", "val", "text")} == {"train": 11, "val": 1, "text": 13}
    records = {record["id"]: record for record in demo.json("materials.json")["materials"]}
    assert {id: record["found"] for id, record in records.items()} == {"base": "made", "pictures": "made"}


def test_status_tells_how_the_demo_stands(demo):
    found = status.read(demo.run)
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert [name for name, stage in stages.items() if stage["state"] == "done"] == [
        *("materials", "corpus", "precompute", "train", "export")
    ]
    assert stages["corpus"]["done"] == 11 + 1 + 13
    assert (stages["train"]["done"], stages["precompute"]["done"]) == (20, stages["precompute"]["total"])
    metrics = found["metrics"]
    assert metrics["train"]["loss"] > 0
    assert metrics["val"]["best_loss"] <= metrics["val"]["val_loss"]
    assert "val_loss" in status.text(found)


def test_what_the_demo_came_to_is_told_in_its_report_and_its_card(demo, monkeypatch):
    monkeypatch.chdir(demo.folder)
    settings, run = config.load(demo.settings), Path("runs/tiny")
    records = demo.json("materials.json")["materials"]
    found = verdict.evaluate(settings, records, run / "trained.safetensors", Path(settings.exported))
    write_json(run / "eval.json", found)
    assert found["metrics"]["val_loss"] < found["metrics"]["base_loss"]
    assert found["metrics"]["shift"] > 0
    rungs = {rung["name"]: rung["passed"] for rung in found["ladder"]["rungs"]}
    assert rungs["inert"]
    assert rungs["weights"]
    assert rungs["conditions"]
    assert found["pictures"]["columns"] == ["base", "step 1", "step 10", "step 20"]
    write_report(run, settings, run / "report.html")
    page = (run / "report.html").read_text()
    assert page.count("<img") == 1 + 3 * len(found["pictures"]["shots"])
    assert "With and without, from the same seeds" in page
    write_card(run, settings, run / "README.md")
    card = (run / "README.md").read_text()
    digests = [sha256(file) for file in settings.exports]
    assert all(digest in card for digest in digests)
    assert str(demo.folder) not in card
    publishing._check(settings, [Path(file) for file in settings.exports], run / "README.md")
    assert {answer.verdict for answer in lora_doctor.answers(lora_doctor.read(run))} == {"yes"}


def test_a_base_that_does_not_fit_where_pictures_are_made_is_told_in_words(demo, monkeypatch):
    def short(*_):
        raise torch.OutOfMemoryError("as a GPU would")

    monkeypatch.chdir(demo.folder)
    monkeypatch.setattr(verdict, "_pipeline", short)
    settings, run = config.load(demo.settings), Path("runs/tiny")
    records = demo.json("materials.json")["materials"]
    with pytest.raises(TrainerError, match=r"set evaluate\.device to cpu, or do without, as runs/lora_demo"):
        verdict.evaluate(settings, records, run / "trained.safetensors", Path(settings.exported))


def test_nothing_is_to_do_again_and_a_snapshot_is_the_same_weights(demo):
    assert demo.planned("runs/lora_demo.safetensors") == {}
    demo.snakemake("snapshot", "--config", "snapshot={at: best}")
    (entry,) = demo.json("snapshots.json")["snapshots"]
    assert (entry["checkpoint"], entry["val_loss"]) == ("best", entry["best_val_loss"])
    names = [f"lora_demo-step{entry['step']}.safetensors", "lora_demo.safetensors"]
    one, other = (load_file(demo.folder / "runs" / name) for name in names)
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_the_doctor_finds_no_problem_and_publishing_without_a_repository_is_refused(demo):
    assert "PROBLEM" not in demo.snakemake("doctor")
    assert "publish needs a repository" in demo.snakemake("publish", fails=True)


def test_adapters_need_no_packages_of_loras():
    shared = "config, doctor, export, materials, publishing, report, snapshots, status, train_process"
    heavy = f"import sys; sys.modules['diffusers'] = sys.modules['peft'] = None\nfrom trainer import {shared}\n"
    heavy += "import trainer.lora.precompute\nassert 'torch' in sys.modules\n"
    light = "import sys\nfrom trainer import config, materials, packs, publishing\nassert 'torch' not in sys.modules\n"
    for given in (heavy, light):
        subprocess.run([sys.executable, "-c", given], check=True, cwd=CHECKOUT / "scripts")
