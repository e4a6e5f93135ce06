"""Precompute: shards that are right stay, bad samples are counted, a stop keeps what was computed."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import tiny_runs
import torch
from safetensors.torch import load_file, save_file
from trainer import config, packs, precompute, shard_index, shards, streaming, teachers, tokenization
from trainer.errors import TrainerError
from trainer.materials import Record
from workflow import prompts


class Asked:
    """Asks to stop at the given look."""

    def __init__(self, stop_at=None):
        self.looks, self.stop_at = 0, stop_at

    def stop(self):
        self.looks += 1
        return self.looks == self.stop_at


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "teacher": tiny_models.t5_snapshot(folder / "teacher", dim=64, vocabulary=500),
        "tokenizer": tiny_models.qwen2_tokenizer(folder / "tokenizer", merges=200),
        "student": tiny_models.student_gguf(folder / "pig_clip.gguf"),
    }
    return {
        id: Record(id, "file", id, id, str(path), "path", None, None, None, None, [], f"digest-{id}")
        for id, path in paths.items()
    }


def settings(tmp_path, **groups):
    shape = {"width": 64, "depth": 1, "student_dim": 64, "teacher_dim": 64, "queries": 24, "vocabulary": 500}
    options = {"device": "cpu", "batch_tokens": 256, "block_shards": 2, "teacher_dtype": "f32", "student_dtype": "f32"}
    given = {"pack": "pixart", "run": "r", "runs_dir": str(tmp_path), "adapter": shape, "precompute": options}
    for group, values in groups.items():
        given[group] = given[group] | values
    return config.load(given)


def corpus(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"{2 * n:016x}", "text": text, "source": "s"} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fill(tmp_path, records, texts, stop_at=None, **groups):
    block(tmp_path, records, texts, stop_at, **groups)
    return [tmp_path / "shards" / f"0000-{n:02d}.safetensors" for n in range(2)]


def block(tmp_path, records, texts, stop_at=None, **groups):
    """The list of block 0 of 2, whose shards are 0 and 1 of 4; ids are even, so shard 1 is empty."""
    made = precompute.Block(settings(tmp_path, **groups), records, Asked(stop_at), 10**9)
    return made.fill(tmp_path / "shards" / "0000.json", 0, 2, corpus(tmp_path / "train.jsonl", texts))


def test_a_sample_goes_to_the_shard_its_id_says_and_its_rows_are_those_of_the_prompt_alone(tmp_path, records):
    texts = ["", *prompts(20)]
    first, second = fill(tmp_path, records, texts)
    assert (len(shards.Shard(first)), len(shards.Shard(second))) == (11, 0)
    alone, _ = fill(tmp_path / "alone", records, texts[:1])
    together = {row.id: row for row in tiny_runs.read(shards.Shard(first))}
    row = tiny_runs.read(shards.Shard(alone))[0]
    assert torch.allclose(together[row.id].student.float(), row.student.float(), atol=2e-2)
    assert torch.allclose(together[row.id].target.float(), row.target.float(), atol=2e-2)
    assert together[row.id].slots == row.slots


def test_a_stopped_block_goes_on_where_it_was_and_ends_in_the_same_bytes(tmp_path, records):
    texts = prompts(60)
    plain = fill(tmp_path / "plain", records, texts)[0].read_bytes()
    with pytest.raises(TrainerError, match="what was computed is kept"):
        fill(tmp_path / "stopped", records, texts, stop_at=4)
    assert (tmp_path / "stopped" / "shards" / "0000.partial").exists()
    path, _ = fill(tmp_path / "stopped", records, texts)
    assert path.read_bytes() == plain
    assert not (tmp_path / "stopped" / "shards" / "0000.partial").exists()


def test_only_shards_whose_samples_changed_are_rebuilt(tmp_path, records):
    texts = prompts(40)
    eight = {"block_shards": 8}
    files = [tmp_path / "shards" / f"0000-{n:02d}.safetensors" for n in range(8)]

    def inodes(texts):
        made = precompute.Block(settings(tmp_path, precompute=eight), records, Asked(), 10**9)
        made.fill(tmp_path / "shards" / "0000.json", 0, 1, corpus(tmp_path / "train.jsonl", texts))
        return [file.stat().st_ino for file in files]

    before, after = inodes(texts), inodes([*texts[:-1], "another prompt"])
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize("digest", ["teacher", "student", "tokenizer"])
def test_other_models_make_all_shards_stale(tmp_path, records, digest):
    fill(tmp_path, records, prompts(8))
    before = (tmp_path / "shards" / "0000-00.safetensors").stat().st_ino
    changed = records | {digest: Record(**(vars(records[digest]) | {"digest": "another"}))}
    fill(tmp_path, changed, prompts(8))
    assert (tmp_path / "shards" / "0000-00.safetensors").stat().st_ino != before


def test_shards_of_another_contract_are_rebuilt(tmp_path, records, monkeypatch):
    fill(tmp_path, records, prompts(8))
    before = (tmp_path / "shards" / "0000-00.safetensors").stat().st_ino
    newer = dataclasses.replace(packs.get("pixart"), contract="t5xxl_pixart/2")
    monkeypatch.setattr(packs, "_PACKS", {"pixart": newer})
    file, _ = fill(tmp_path, records, prompts(8))
    assert file.stat().st_ino != before
    assert shards.Shard(file).header["contract"] == "t5xxl_pixart/2"


def test_a_prompt_too_long_for_the_student_is_skipped_and_listed(tmp_path, records):
    file, _ = fill(tmp_path, records, [*prompts(40), "word " * 400])
    header = shards.Shard(file).header
    assert header["samples"] == 20
    assert header["skipped"] == [{"id": f"{80:016x}", "reason": "longer than 256 student tokens"}]


def test_too_many_bad_samples_stop_the_run_and_say_why(tmp_path, records):
    with pytest.raises(TrainerError, match=r"samples of .* cannot be used \(\d+ longer than 256"):
        fill(tmp_path, records, [*prompts(20), *["word " * (400 + n) for n in range(8)]])


def test_rows_that_are_not_finite_are_skipped_listed_and_not_counted_in_the_moments(tmp_path, records):
    teacher = teachers.load("t5", Path(records["teacher"].path), torch.float32)
    used = {id for row in teacher.tokenize(prompts(30), 24) for id in row}
    words = [f"{a}{b}" for a in "jqxz" for b in "jqxz0123456789"]
    bad, word = next((id, w) for w in words for id in teacher.tokenize([w], 24)[0] if id not in used)
    texts = [*prompts(30), word]
    path = tmp_path / "teacher"
    shutil.copytree(records["teacher"].path, path)
    weights = load_file(path / "model.safetensors")
    weights["shared.weight"][bad] = float("inf")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    changed = records | {"teacher": Record(**(vars(records["teacher"]) | {"path": str(path)}))}
    file, _ = fill(tmp_path, changed, texts)
    header, tensors = shards.Shard(file).header, load_file(file)
    assert header["skipped"] == [{"id": f"{60:016x}", "reason": "non-finite rows"}]
    assert f"{60:016x}" not in header["ids"]
    for name in ("student", "target"):
        rows = tensors[name].double()
        torch.testing.assert_close(tensors[f"{name}_sum"], rows.sum(0))
        torch.testing.assert_close(tensors[f"{name}_sumsq"], rows.square().sum(0))


def test_moments_are_those_of_the_rows(tmp_path, records):
    tensors = load_file(fill(tmp_path, records, prompts(30))[0])
    for name in ("student", "target"):
        rows = tensors[name].double()
        torch.testing.assert_close(tensors[f"{name}_sum"], rows.sum(0))
        torch.testing.assert_close(tensors[f"{name}_sumsq"], rows.square().sum(0))


def test_out_of_memory_is_answered_with_smaller_batches(tmp_path, records, monkeypatch):
    original = streaming.functional_call

    def narrow(module, weights, arguments):
        if len(arguments[0]["lengths"]) > 2:
            raise torch.OutOfMemoryError
        return original(module, weights, arguments)

    monkeypatch.setattr(streaming, "functional_call", narrow)
    file, _ = fill(tmp_path, records, prompts(30))
    assert len(shards.Shard(file)) == 15


def test_out_of_memory_outside_of_a_batch_is_told_in_words(tmp_path, records, monkeypatch):
    def full(size, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(streaming, "_Room", full)
    with pytest.raises(TrainerError, match=r"out of memory on cpu .* lower precompute\.gpu_gib"):
        fill(tmp_path, records, prompts(8))


def test_a_teacher_larger_than_its_memory_gives_the_same_shards(tmp_path, records):
    whole = fill(tmp_path / "whole", records, prompts(30))[0]
    # The largest part, the embeddings of 500 x 64 in f32, takes 0.12 MiB; all of it 0.5.
    streamed = fill(tmp_path / "streamed", records, prompts(30), precompute={"ram_gib": 0.4 / 1024})[0]
    assert streamed.read_bytes() == whole.read_bytes()


def test_a_streamed_block_that_was_stopped_between_two_layers_goes_on_there(tmp_path, records, caplog):
    small = {"precompute": {"ram_gib": 0.4 / 1024}}
    plain = fill(tmp_path / "plain", records, prompts(30), **small)[0].read_bytes()
    for stop_at in (2, 5, 3):
        with pytest.raises(TrainerError, match="what was computed is kept"):
            fill(tmp_path / "stopped", records, prompts(30), stop_at=stop_at, **small)
    assert fill(tmp_path / "stopped", records, prompts(30), **small)[0].read_bytes() == plain
    assert not list((tmp_path / "stopped" / "shards").glob("*.partial"))


def test_a_block_stopped_on_one_number_type_does_not_go_on_in_another(tmp_path, records, monkeypatch):
    """`auto` may mean another one on the next device."""
    auto = {"precompute": {"ram_gib": 0.4 / 1024, "teacher_dtype": "auto", "student_dtype": "auto"}}
    monkeypatch.setattr(precompute.devices, "multiplies_bf16", lambda device: True)
    plain = fill(tmp_path / "plain", records, prompts(60), **auto)[0].read_bytes()
    monkeypatch.setattr(precompute.devices, "multiplies_bf16", lambda device: False)
    with pytest.raises(TrainerError, match="what was computed is kept"):
        fill(tmp_path / "stopped", records, prompts(60), stop_at=12, **auto)
    monkeypatch.setattr(precompute.devices, "multiplies_bf16", lambda device: True)
    assert fill(tmp_path / "stopped", records, prompts(60), **auto)[0].read_bytes() == plain


def test_a_stop_in_the_teacher_keeps_what_the_student_computed(tmp_path, records, monkeypatch):
    run, original = [], streaming.functional_call

    def counted(module, weights, arguments):
        run.append(type(module).__name__)
        return original(module, weights, arguments)

    monkeypatch.setattr(streaming, "functional_call", counted)
    plain = fill(tmp_path / "plain", records, prompts(60))[0].read_bytes()
    student = run.count("Student")
    with pytest.raises(TrainerError, match="what was computed is kept"):
        fill(tmp_path / "stopped", records, prompts(60), stop_at=student + 1)
    run.clear()
    assert fill(tmp_path / "stopped", records, prompts(60))[0].read_bytes() == plain
    assert "Student" not in run


def test_a_job_killed_after_its_last_shard_leaves_nothing_to_the_next(tmp_path, records):
    file, _ = fill(tmp_path, records, prompts(8))
    (tmp_path / "shards" / "0000.partial" / "teacher").mkdir(parents=True)
    file.with_suffix(".damaged").touch()
    fill(tmp_path, records, prompts(8))
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".safetensors", ".safetensors"]


def test_student_states_make_way_for_the_teacher(tmp_path, records):
    """All of them in memory would leave it too little."""
    few = {"ram_gib": 0.3 / 1024}
    assert len(shards.Shard(fill(tmp_path, records, prompts(200), precompute=few)[0])) == 100


def test_a_student_of_another_width_is_refused_before_the_teacher_is_loaded(tmp_path, records, monkeypatch):
    monkeypatch.setattr(precompute.teachers, "load", lambda *a: pytest.fail("the teacher was loaded"))
    with pytest.raises(TrainerError, match="32"):
        fill(tmp_path, records, prompts(4), adapter={"student_dim": 32})


def test_an_index_refuses_blocks_of_different_models(tmp_path, records):
    train = block(tmp_path, records, prompts(8)) | {"of": 2}
    index = shard_index.index({"train": [train], "val": [train]}, "pixart")
    assert (index["train"]["samples"], index["pack"]) == (4, "pixart")
    changed = records | {"student": Record(**(vars(records["student"]) | {"digest": "another"}))}
    val = block(tmp_path, changed, prompts(8))
    with pytest.raises(TrainerError, match="different models"):
        shard_index.index({"train": [train], "val": [val]}, "pixart")


def test_what_training_depends_on_is_all_of_the_index_but_the_probe_shards():
    index = {"pack": "pixart", "train": {"shards": [1]}, "val": {"shards": [2]}}
    whole = shard_index.trained_on(index)
    assert whole == shard_index.trained_on(index | {"probe": {"shards": [3]}})
    assert whole != shard_index.trained_on(index | {"val": {"shards": [4]}})


def test_probe_prompts_that_do_not_fit_are_skipped_and_stop_nothing(tmp_path, records):
    made = precompute.Block(settings(tmp_path), records, Asked(), 10**9)
    texts = ["word " * 300] * 3 + ["an accordion"]
    list_ = made.fill(tmp_path / "probe" / "0000.json", 0, 1, corpus(tmp_path / "probe.jsonl", texts))
    assert [shard["samples"] for shard in list_["shards"]] == [1, 0]
    assert list_["shards"][0]["skipped"] == {"longer than 256 student tokens": 3}
    with pytest.raises(TrainerError, match="cannot be used"):
        fill(tmp_path, records, texts)


def test_an_index_refuses_blocks_that_shared_the_prompts_out_differently(tmp_path, records):
    train = block(tmp_path, records, prompts(8))  # 2 shards of 4
    assert shard_index.index({"train": [train, train]}, "pixart")["train"]["samples"] == 8
    with pytest.raises(TrainerError, match="number of shards was changed"):
        shard_index.index({"train": [train, train], "val": [train]}, "pixart")


def test_a_pack_without_seeds_has_a_row_for_every_query_and_the_student_reads_its_template(tmp_path, records):
    shape = {"width": 64, "depth": 1, "student_dim": 64, "teacher_dim": 64, "queries": 24}
    options = {"device": "cpu", "block_shards": 2, "student_dtype": "f32", "teacher": "synthetic"}
    made = config.load({"pack": "llada_image", "runs_dir": str(tmp_path), "adapter": shape, "precompute": options})
    block = precompute.Block(made, records, Asked(), 10**9)
    block.fill(tmp_path / "0000.json", 0, 2, corpus(tmp_path / "train.jsonl", ["", "a red fox"]))
    shard = shards.Shard(tmp_path / "0000-00.safetensors")
    tokenizer = tokenization.student_tokenizer(Path(records["student"].path), Path(records["tokenizer"].path))
    (ids,) = tokenizer.encode([""], packs.get("llada_image").template)
    (row,) = (row for row in tiny_runs.read(shard) if row.id == "0" * 16)
    assert (row.slots, len(row.target), len(row.student)) == ([], 24, len(ids))


def test_the_synthetic_teacher_is_recorded_in_the_shard(tmp_path, records):
    file, _ = fill(tmp_path, records, prompts(8), precompute={"teacher": "synthetic"})
    header = shards.Shard(Path(file)).header
    assert (header["synthetic"], header["teacher"]) == (True, None)


def worker(run, *numbers):
    """A process that fills these of twelve blocks."""
    command = [sys.executable, str(Path(__file__).with_name("block_worker.py")), str(run), "12", *map(str, numbers)]
    paths = os.pathsep.join(str(Path(__file__).parent.parent / name) for name in ("scripts", "tests"))
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": paths}
    )


def test_twelve_blocks_on_two_devices_are_those_of_one_also_when_one_worker_is_killed(tmp_path, records):
    """In any order: each device takes blocks of its own, and nothing in a shard says which."""

    def prepare(name):
        run = tmp_path / name
        corpus(run / "train.jsonl", prompts(240))
        given = settings(run, precompute={"ram_gib": 0.4 / 1024}).model_dump()
        made = {"settings": given, "records": {id: vars(record) for id, record in records.items()}}
        (run / "worker.json").write_text(json.dumps(made))
        return run

    one, two = prepare("one"), prepare("two")
    assert worker(one, *range(12)).wait() == 0
    first, second = worker(two, *range(0, 12, 2)), worker(two, *range(11, 0, -2))
    for _ in range(3):
        second.stdout.readline()
    second.kill()
    assert first.wait() == 0
    second.wait()
    assert worker(two, *range(1, 12, 2)).wait() == 0
    shards_of = [sorted((run / "shards").glob("*")) for run in (one, two)]
    assert [file.name for file in shards_of[0]] == [file.name for file in shards_of[1]]
    assert sum(file.suffix == ".safetensors" for file in shards_of[0]) == 24
    for mine, other in zip(*shards_of, strict=True):
        assert mine.read_bytes() == other.read_bytes(), mine.name
