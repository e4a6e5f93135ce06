"""Sets of captioned pictures as materials, and pictures in the report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import finished_run
import pytest
from fake_hub import COMMIT, LARGE, FakeHub
from tiny_pictures import write_coco, write_flickr30k, write_folder
from trainer import finding, hub, materials, picture_corpus
from trainer.config import Corpus, Settings
from trainer.errors import TrainerError
from trainer.materials import read_record
from trainer.packs.base import AdapterPack
from trainer.report import write_report

SCRIPTS = Path(__file__).parents[1] / "scripts"
COCO = "Multimodal-Fatima/COCO_captions_train"
FIND = """
import logging, sys
from trainer import finding
from trainer.config import Settings
from trainer.files import write_json
from dataclasses import asdict
logging.basicConfig(level=logging.INFO)
settings, id, out = sys.argv[1:]
write_json(out, asdict(finding.prepare(Settings.model_validate_json(settings), id)))
"""


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No network and no cache of this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("GGUF_TRAINER_MATERIALS", raising=False)


def settings(tmp_path, preset, **groups):
    corpus = {"presets": [], "image_presets": [preset]}
    return Settings.model_validate({"runs_dir": str(tmp_path / "runs"), "corpus": corpus} | groups)


def searched(tmp_path, preset, folder):
    return settings(tmp_path, preset, materials={"search": [str(folder)]})


def test_presets_of_pictures_are_materials_that_the_corpus_needs(tmp_path):
    both = settings(tmp_path, "flickr30k", pack="pixart")
    both.corpus.image_presets.append("coco_captions")
    assert materials.ids(both, role=("prompts", "images")) == ["images-flickr30k", "images-coco_captions"]
    flickr, coco = (materials.get(both, id) for id in ("images-flickr30k", "images-coco_captions"))
    assert flickr.revision == "2b239befc81b6e3f035ce6bd52f5f4d60f5625f7"
    assert coco.revision == "main"
    assert "hf download nlphuji/flickr30k --repo-type dataset --revision 2b" in hub.how_to_get(flickr, flickr.revision)


def test_sets_are_found_where_they_lie_and_read(tmp_path):
    write_flickr30k(tmp_path / "sets" / "flickr30k", range(5))
    write_coco(tmp_path / "sets" / "COCO_captions_train", range(5))
    for preset in ("flickr30k", "coco_captions"):
        record = finding.prepare(searched(tmp_path, preset, tmp_path / "sets"), f"images-{preset}")
        assert record.found == "search"
        assert len(record.files) == 2


def test_a_set_that_is_not_whole_is_not_taken(tmp_path):
    root = write_coco(tmp_path / "COCO_captions_train", range(8), files=4)
    (root / "data" / "train-00002-of-00004.parquet").unlink()
    with pytest.raises(TrainerError, match="of 00004 numbered files it lacks number 2"):
        finding.prepare(searched(tmp_path, "coco_captions", tmp_path), "images-coco_captions")
    root = write_flickr30k(tmp_path / "flickr30k", range(5))
    archive = root / "flickr30k-images.zip"
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(TrainerError, match=r"flickr30k-images.zip is truncated or damaged"):
        finding.prepare(searched(tmp_path, "flickr30k", tmp_path), "images-flickr30k")


def test_a_set_is_downloaded_from_the_data_sets_of_the_hub_pinned_and_goes_on_after_a_cut(tmp_path):
    root = write_coco(tmp_path / "made", range(40), files=2)
    files = {f"data/{path.name}": path.read_bytes() for path in sorted((root / "data").iterdir())}
    assert all(len(data) > LARGE for data in files.values())
    served = FakeHub(COCO, files | {"README.md": b"no part of it"})
    served.cut = 1
    wanted = settings(tmp_path, "coco_captions")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(SCRIPTS)}
    env["no_proxy"] = "127.0.0.1"
    out = tmp_path / "record.json"
    command = [sys.executable, "-c", FIND, wanted.model_dump_json(), "images-coco_captions", str(out)]
    try:
        done = subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=120, check=False)
    finally:
        served.shutdown()
    assert done.returncode == 0, done.stderr
    record = read_record(out)
    assert (record.found, record.revision) == ("downloaded", COMMIT)
    assert f"datasets--{COCO.replace('/', '--')}" in record.path
    assert {file["name"]: file["bytes"] for file in record.files} == {name: len(data) for name, data in files.items()}
    assert not served.ranges("README.md")


# The report


def test_a_report_shows_some_of_the_samples_with_their_pictures_in_one_small_file(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_corpus, "MIN_VAL", 1)
    folder, run = finished_run.build(tmp_path)
    pictures = write_folder(tmp_path / "in", range(40))
    (pictures / "00.png").write_bytes(b"broken")
    chosen = Corpus(presets=[], image_folders=[str(pictures)], n_image=300, n_two=30, n_val_image=20, val_fraction=0.3)
    split = {name: folder / "corpus" / f"{name}.jsonl" for name in AdapterPack.splits}
    picture_corpus.build(chosen, [], split, folder / "corpus.json")
    out = folder / "report.html"
    write_report(folder, run, out)
    page = out.read_text(encoding="utf-8")
    assert page.count('<img src="data:image/jpeg;base64,') == 20 + 2 * 4
    assert all(image.startswith("data:image/jpeg;base64,") for image in re.findall(r'<img src="([^"]*)"', page))
    assert out.stat().st_size < 1_500_000
    assert "39 different pictures of 40 that were read" in re.sub(r"\s+", " ", page)
    assert "00.png" in page
    told = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["pictures"]
    assert told["skipped"] == [{"source": str(pictures), "name": "00.png", "reason": told["skipped"][0]["reason"]}]
    write_report(folder, run, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == out.read_bytes()
