"""Streaming: one pass over the weights, within the memory given, and the same bytes as with all of it."""

import json
import threading
from pathlib import Path

import psutil
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from trainer import streaming, teachers
from trainer.devices import Budget
from trainer.errors import TrainerError
from trainer.streaming import Activations, Executor, Part
from trainer.weights import Weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    """Six layers of 0.2 MB and embeddings of 0.13 MB, in bf16 and several files."""
    folder = tmp_path_factory.mktemp("t5")
    return tiny_models.t5_snapshot(folder, dim=64, layers=6, vocabulary=1000, max_shard_size="300KB")


def batches(count=5):
    random = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        lengths = torch.randint(1, 9, (3 + number,), generator=random)
        ids = torch.randint(2, 900, (len(lengths), int(lengths.max())), generator=random)
        made.append({"ids": ids * (torch.arange(ids.shape[1]) < lengths[:, None]), "lengths": lengths})
    return made


def run(teacher, folder, ram, stop=lambda: False, states=None):
    """The rows of each batch, and the executor."""
    states = states or batches()
    executor = Executor("teacher", teacher.parts, teacher.weights, CPU, Budget(ram, ram))
    kept = Activations(states.__getitem__, [f"batch{n}" for n in range(len(states))], folder)
    order = list(executor.run(kept, lambda n, state: state, stop, lambda n: None))
    assert order == list(range(len(states)))
    return [kept.state(number)["rows"] for number in order], executor


def largest(teacher):
    return max(part.bytes for part in teacher.parts)


def test_streamed_equals_resident_to_the_bit_and_reads_each_weight_once(t5, tmp_path):
    teacher = teachers.load("t5", t5, torch.float32)
    whole, executor = run(teacher, tmp_path / "a", 1 << 30)
    assert executor.resident
    size = sum(stored.bytes for stored in teacher.weights.tensors.values())
    read = teacher.weights.bytes_read
    assert size <= read <= 1.01 * size  # each layer reads the one table of relative positions
    for rooms in (2, 1):
        teacher.weights.bytes_read = 0
        rows, executor = run(teacher, tmp_path / "b", int((rooms + 0.1) * largest(teacher) / 0.75))
        assert not executor.resident
        assert executor._rooms == rooms
        assert all(map(torch.equal, rows, whole))
        assert teacher.weights.bytes_read == read


def test_bytes_read_do_not_depend_on_the_number_of_batches(t5, tmp_path):
    teacher = teachers.load("t5", t5, torch.float32)
    read = []
    for count in (1, 20):
        teacher.weights.bytes_read = 0
        run(teacher, tmp_path, int(2.1 * largest(teacher) / 0.75), states=batches(count))
        read.append(teacher.weights.bytes_read)
    assert read[0] == read[1]


def test_what_does_not_fit_between_two_parts_waits_on_disk_and_comes_back_the_same(t5, tmp_path):
    teacher = teachers.load("t5", t5, torch.bfloat16)
    whole, _ = run(teacher, tmp_path / "a", 1 << 30)
    room = int(2 * largest(teacher) / 0.75) + 1000  # less than one batch beside the weights
    seen = set()
    states = batches()
    executor = Executor("teacher", teacher.parts, teacher.weights, CPU, Budget(room, room))
    kept = Activations(states.__getitem__, [f"batch{n}" for n in range(len(states))], tmp_path / "b")
    watch = lambda number: seen.update(file.name for file in (tmp_path / "b").glob("*"))  # noqa: E731
    list(executor.run(kept, lambda n, state: state, lambda: False, watch))
    assert {
        f"batch{n}-{level}.safetensors" for n in range(len(states)) for level in range(1, len(teacher.parts))
    } <= seen
    assert len(list((tmp_path / "b").glob("*"))) == len(states)
    assert all(torch.equal(kept.state(n)["rows"], rows) for n, rows in enumerate(whole))


def test_states_of_a_gpu_count_in_ram_as_what_pinned_memory_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_to_ram", lambda tensor: tensor)
    kept = Activations(batches(1).__getitem__, ["a"], tmp_path)
    kept.place(torch.device("meta"), 0, 200)
    state = {"hidden": torch.empty(65, dtype=torch.uint8, device="meta")}
    kept.put(0, 1, state)
    assert kept.held == 128
    kept.place(torch.device("meta"), 100, 200)
    kept.put(0, 2, state)
    assert kept.held == 0


def test_memory_stays_within_the_budget(tmp_path):
    """128 MB of weights through 48 MB, measured on the process: pages of a mapping would count."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2048, 2048))

        def forward(self, state):
            return {"rows": torch.nn.functional.linear(state["rows"], self.weight).relu()}

    tensors = {f"layer{n}": torch.randn(2048, 2048) / 45 for n in range(8)}
    for n in range(8):
        save_file({f"layer{n}": tensors[f"layer{n}"]}, tmp_path / f"model-{n}.safetensors")
    with torch.device("meta"):
        module = Square().requires_grad_(False)
    parts = [Part(f"layer {n}", module, {"weight": (f"layer{n}",)}) for n in range(8)]
    states = [{"rows": torch.randn(4, 2048)} for _ in range(3)]
    expected = [state["rows"] for state in states]
    for n in range(8):
        expected = [torch.nn.functional.linear(rows, tensors[f"layer{n}"]).relu() for rows in expected]
    del tensors
    budget = 48 << 20
    executor = Executor("teacher", parts, Weights(tmp_path), CPU, Budget(budget, budget))
    kept = Activations(states.__getitem__, ["a", "b", "c"], tmp_path / "kept")
    process = psutil.Process()
    base, peak, done = process.memory_info().rss, [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    list(executor.run(kept, lambda n, state: state, lambda: False, lambda n: None))
    done.set()
    watcher.join()
    assert not executor.resident
    assert peak[0] - base < budget
    for number, rows in enumerate(expected):
        torch.testing.assert_close(kept.state(number)["rows"], rows)


def test_a_part_that_cannot_fit_is_one_clear_sentence(t5):
    teacher = teachers.load("t5", t5, torch.float32)
    with pytest.raises(TrainerError, match=r"the part '.*' of the teacher takes .* raise precompute\.ram_gib"):
        Executor("teacher", teacher.parts, teacher.weights, CPU, Budget(1000, 1000))


@pytest.mark.parametrize("memory", ["resident", "streamed"])
def test_a_stopped_run_goes_on_at_the_batch_and_part_it_was_at(t5, tmp_path, memory):
    teacher = teachers.load("t5", t5, torch.float32)
    ram = 1 << 30 if memory == "resident" else int(2.1 * largest(teacher) / 0.75)
    whole, _ = run(teacher, tmp_path / "whole", ram)
    steps = []

    def counted(stop_at):
        looks = iter(range(10**6))
        return lambda: next(looks) == stop_at

    for stop_at in (2, 1, 1):
        with pytest.raises(TrainerError, match="what was computed is kept"):
            run(teacher, tmp_path / "stopped", ram, counted(stop_at))
        steps.append(sum(int(file.stem.partition("-")[2]) for file in (tmp_path / "stopped").glob("*")))
    assert steps == sorted(set(steps))
    rows, _ = run(teacher, tmp_path / "stopped", ram)
    assert all(map(torch.equal, rows, whole))


def test_what_was_saved_of_other_batches_is_not_used(t5, tmp_path):
    teacher = teachers.load("t5", t5, torch.float32)
    with pytest.raises(TrainerError):
        run(teacher, tmp_path, 1 << 30, iter([False, False, True]).__next__)
    assert list(tmp_path.glob("batch*"))
    kept = Activations(batches().__getitem__, [f"other{n}" for n in range(5)], tmp_path)
    assert kept.levels == [0] * 5
    assert not list(tmp_path.glob("batch*"))


def test_a_half_written_file_of_a_killed_run_is_removed(tmp_path):
    (tmp_path / ".a-1.safetensors.part").write_bytes(b"half")
    kept = Activations(batches(1).__getitem__, ["a"], tmp_path)
    assert kept.levels == [0]
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("room", [0, 1000])
def test_what_a_stop_saved_survives_that_the_run_after_it_is_killed_anywhere(t5, tmp_path, room):
    """With room for some states in memory and with none."""
    teacher = teachers.load("t5", t5, torch.float32)
    ram = int(2 * largest(teacher) / 0.75) + room
    whole, _ = run(teacher, tmp_path / "whole", ram)
    kept = tmp_path / "kept"
    with pytest.raises(TrainerError, match="what was computed is kept"):
        run(teacher, kept, ram, iter([False] * 12 + [True]).__next__)
    for steps in (0, 1, 5):
        looks = iter([False] * steps)

        def die(looks=looks):
            for answer in looks:
                return answer
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(teacher, kept, ram, die)
        levels = Activations(batches().__getitem__, [f"batch{n}" for n in range(5)], kept).levels
        assert sum(levels) >= 12
    rows, _ = run(teacher, kept, ram)
    assert all(map(torch.equal, rows, whole))


def test_an_error_while_reading_weights_ends_the_run(t5, tmp_path):
    teacher = teachers.load("t5", t5, torch.float32)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in t5.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    teacher = teachers.load("t5", copy, torch.float32)
    for file in copy.glob("*.safetensors"):
        with open(file, "rb+") as handle:
            handle.truncate(file.stat().st_size // 2)
    with pytest.raises(TrainerError, match="ends within a tensor"):
        run(teacher, tmp_path / "kept", int(2.1 * largest(teacher) / 0.75))


def test_a_tensor_of_another_shape_or_a_quantized_type_is_refused(t5, tmp_path):
    for file in t5.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((t5 / "model.safetensors.index.json").read_text())["weight_map"]
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    file = tmp_path / index[name]
    weights = load_file(file)
    save_file(weights | {name: weights[name][:-1].clone()}, file)
    with pytest.raises(TrainerError, match=r"SelfAttention\.q\.weight in the shape .* does not belong"):
        teachers.load("t5", tmp_path, torch.float32)
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(TrainerError, match="in a quantized type"):
        teachers.load("t5", tmp_path, torch.float32)


class Stack(nn.Module):
    """A parameter that is made of several stored tensors."""

    def __init__(self, rows, columns):
        super().__init__()
        self.stack = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32))

    def forward(self, state):
        return {"rows": state["rows"] + self.stack.sum(0)}


@given(heights=st.lists(st.integers(1, 7), min_size=1, max_size=5), columns=st.integers(1, 9), narrow=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_parameter_is_the_stored_tensors_one_after_another_in_its_own_dtype(tmp_path, heights, columns, narrow):
    stored = {
        f"t{n}": torch.randn(height, columns).to(torch.bfloat16 if narrow else torch.float32)
        for n, height in enumerate(heights)
    }
    save_file(stored, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Stack(sum(heights), columns)
    part = Part("stack", module, {"stack": tuple(stored)})
    weights = Weights(tmp_path)
    streaming.check([part], weights)
    executor = Executor("teacher", [part], weights, CPU, Budget(1 << 20, 1 << 20))
    kept = Activations([{"rows": torch.zeros(1, columns)}].__getitem__, ["a"], tmp_path / "kept")
    list(executor.run(kept, lambda n, state: state, lambda: False, lambda n: None))
    expected = torch.cat([tensor.float() for tensor in stored.values()]).sum(0)
    torch.testing.assert_close(kept.state(0)["rows"][0], expected)


def test_large_tensors_are_converted_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.weights._PIECE", 64)
    stored = torch.randn(50, 7, dtype=torch.bfloat16)
    save_file({"t": stored}, tmp_path / "model.safetensors")
    out = torch.empty(350 * 4, dtype=torch.uint8)
    Weights(tmp_path).read([("t", torch.float32, out)])
    assert torch.equal(out.view(torch.float32).view(50, 7), stored.float())


def test_of_two_indexes_that_of_the_weights_counts_not_that_of_a_variant(tmp_path):
    for value, name in enumerate(("model", "model.fp16")):
        save_file({"w": torch.full((2,), float(value))}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {"w": f"{name}.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    assert Weights(tmp_path).tensor("w").tolist() == [0, 0]


def test_components_of_a_snapshot_keep_their_folder_in_the_name(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / folder / "model.safetensors")
    assert Weights(tmp_path, ("one", "two")).shapes == {"one/w": (2,), "two/w": (2,)}
    with pytest.raises(TrainerError, match=r"three has no weights in safetensors files"):
        Weights(tmp_path, ("one", "three"))


@pytest.mark.parametrize("memory", ["resident", "streamed"])
def test_batches_are_made_a_few_ahead_and_not_all_at_once(t5, tmp_path, memory):
    teacher = teachers.load("t5", t5, torch.float32)
    ram = 1 << 30 if memory == "resident" else int(2.1 * largest(teacher) / 0.75)
    states, made, most = batches(12), [], []

    def make(number):
        made.append(number)
        return states[number]

    executor = Executor("teacher", teacher.parts, teacher.weights, CPU, Budget(ram, ram))
    kept = Activations(make, [f"batch{n}" for n in range(12)], tmp_path)
    last = [-1]

    def watch(number):
        last[0] = max(last[0], number)
        most.append(len(made) - 1 - last[0])

    list(executor.run(kept, lambda n, state: state, lambda: False, watch))
    assert sorted(made) == list(range(12))
    assert max(most) <= streaming._AHEAD


def test_an_error_in_the_making_of_a_batch_ends_the_run(t5, tmp_path):
    def broken(number):
        raise TrainerError(f"no batch {number}")

    teacher = teachers.load("t5", t5, torch.float32)
    executor = Executor("teacher", teacher.parts, teacher.weights, CPU, Budget(1 << 30, 1 << 30))
    with pytest.raises(TrainerError, match="no batch 0"):
        list(executor.run(Activations(broken, ["a", "b"], tmp_path), lambda n, it: it, lambda: False, lambda n: None))


def test_a_sample_of_a_batch_is_the_same_in_memory_and_on_disk(tmp_path):
    states = [{"rows": torch.arange(24).view(2, 3, 4).bfloat16(), "more": torch.ones(2, 1)}]
    for room in (1 << 20, 0):
        kept = Activations(states.__getitem__, ["a"], tmp_path / f"{room}")
        kept.place(CPU, 0, room)
        kept.put(0, 1, states[0])
        assert (kept.held > 0) == (room > 0)
        (rows,) = kept.sample(0, 1, ["rows"]).values()
        assert torch.equal(rows, states[0]["rows"][1])
