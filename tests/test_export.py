"""The exported file: the engine's layout, the checkpoint's answers, nothing lost."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_runs
import torch
from test_training import go
from trainer import checkpoints, corpus_files, evaluation, export, snapshots
from trainer.errors import TrainerError
from trainer.shards import Shard


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = tiny_runs.settings(tmp_path_factory.mktemp("trained"), steps=60, keep_every=10, lr=3e-3)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    out = Path(settings.gguf)
    export.export_best(settings, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    return settings, inputs, out


def expected_layout(width, depth, student, teacher, queries, vocabulary):
    """contracts: names, torch shapes and types of a seeded resampler."""
    f16, f32 = np.float16, np.float32
    layout = {
        "query": ((queries, width), f32),
        "t5_embed.weight": ((vocabulary, width), f16),
        "in_proj.weight": ((width, student), f16),
        "in_proj.bias": ((width,), f32),
        "ln_out.weight": ((width,), f32),
        "ln_out.bias": ((width,), f32),
        "out_proj.weight": ((teacher, width), f16),
        "out_proj.bias": ((teacher,), f32),
    }
    for n in range(depth):
        for norm in ("ln_self", "ln_q", "ln_kv", "ln_mlp"):
            layout |= {f"blocks.{n}.{norm}.{kind}": ((width,), f32) for kind in ("weight", "bias")}
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                layout[f"blocks.{n}.{attention}.{part}.weight"] = ((width, width), f16)
                layout[f"blocks.{n}.{attention}.{part}.bias"] = ((width,), f32)
        layout[f"blocks.{n}.mlp.0.weight"] = ((4 * width, width), f16)
        layout[f"blocks.{n}.mlp.0.bias"] = ((4 * width,), f32)
        layout[f"blocks.{n}.mlp.2.weight"] = ((width, 4 * width), f16)
        layout[f"blocks.{n}.mlp.2.bias"] = ((width,), f32)
    return {f"adapter.{name}": value for name, value in layout.items()}


def test_names_shapes_and_types_are_the_engines(trained):
    _settings, _, out = trained
    found = {name: (array.shape, array.dtype.type) for name, array in export.read_arrays(out).items()}
    assert found == expected_layout(
        64, 1, tiny_runs.STUDENT, tiny_runs.TEACHER, tiny_runs.QUERIES, tiny_runs.VOCABULARY
    )


def test_a_full_size_pixart_file_has_176_tensors():
    assert len(expected_layout(1024, 6, 1024, 4096, 120, 32128)) == 176


def plain_forward(tensors, student, slots):
    """The published equations, one sample, from tensor names alone, in f64 without our modules."""
    t = {name.removeprefix("adapter."): torch.from_numpy(a.astype(np.float64)) for name, a in tensors.items()}

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    def attention(x, source, name):
        q, k, v = linear(x, f"{name}.q"), linear(source, f"{name}.k"), linear(source, f"{name}.v")
        parts = []
        for head in range(q.shape[1] // 64):
            a, b = 64 * head, 64 * head + 64
            parts.append((q[:, a:b] @ k[:, a:b].T / 8).softmax(-1) @ v[:, a:b])
        return linear(torch.cat(parts, -1), f"{name}.o")

    kv = linear(student.double(), "in_proj")
    padded = torch.zeros(len(t["query"]), dtype=torch.int64)
    padded[: len(slots)] = torch.tensor(slots)
    q = t["query"] + t["t5_embed.weight"][padded]
    depth = 1 + max(int(name.split(".")[1]) for name in t if name.startswith("blocks."))
    for n in range(depth):
        own = norm(q, f"blocks.{n}.ln_self")
        q = q + attention(own, own, f"blocks.{n}.self_attn")
        q = q + attention(norm(q, f"blocks.{n}.ln_q"), norm(kv, f"blocks.{n}.ln_kv"), f"blocks.{n}.cross_attn")
        hidden = linear(norm(q, f"blocks.{n}.ln_mlp"), f"blocks.{n}.mlp.0")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        q = q + linear(hidden, f"blocks.{n}.mlp.2")
    return linear(norm(q, "ln_out"), "out_proj")[: len(slots)]


def test_the_file_answers_as_the_checkpoint_does_to_f16_rounding(trained):
    _settings, inputs, out = trained
    weights, scale = checkpoints.unpack(checkpoints.load(inputs.run / "checkpoints" / "best.safetensors")[0])
    ours = evaluation.SeededResampler.of(weights)
    arrays = export.read_arrays(out)
    shard = Shard(inputs.val[0])
    for number in range(5):
        row = shard.rows(number)
        slots = torch.zeros(1, tiny_runs.QUERIES, dtype=torch.int64)
        slots[0, : len(row.slots)] = torch.tensor(row.slots)
        trunk = ours(scale.student(row.student)[None], None, slots)
        mine = scale.raw(ours.head(trunk[0, : len(row.slots)]))
        from_file = plain_forward(arrays, row.student, row.slots).float()
        assert (mine - from_file).abs().max() < 5e-3 * mine.abs().max()


def test_evaluation_gives_the_figure_of_training(trained):
    settings, inputs, out = trained
    best = inputs.run / "checkpoints" / "best.safetensors"
    result = evaluation.evaluate(settings, out, best, inputs.val, {})
    metrics = result["metrics"]
    assert metrics["cos"] == pytest.approx(checkpoints.read_meta(best)["val"]["cos"], abs=1e-4)
    assert metrics["roundtrip_cos"] > 0.99999
    assert metrics["cos"] > metrics["baseline_cos"]
    assert result["val_rows"] == inputs.index["val"]["rows"]


def test_provenance_is_in_the_file(trained):
    _settings, _inputs, out = trained
    keys = export.read_keys(out)
    assert keys["general.architecture"] == "pig"
    assert keys["adapter.teacher"] == "example/t5"
    assert keys["adapter.teacher_revision"] == "a" * 40
    assert keys["adapter.planned_steps"] == 60
    assert keys["adapter.checkpoint"] == "best"
    assert keys["adapter.snapshot"] is False
    assert keys["adapter.val_cos"] == pytest.approx(keys["adapter.best_val_cos"])


def test_the_same_checkpoint_gives_the_same_bytes(trained):
    settings, inputs, out = trained
    before = out.read_bytes()
    export.export_best(settings, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    assert out.read_bytes() == before


def test_a_kept_step_exports_bit_for_bit_what_a_snapshot_at_that_step_would_have_been(trained, tmp_path):
    settings, _inputs, _ = trained
    settings.snapshot.at = "30"
    later = snapshots.take(settings, tiny_runs.RECORDS, {})
    stopped = tiny_runs.settings(tmp_path, steps=60, lr=3e-3)
    with pytest.raises(TrainerError, match="stopped at step 30"):
        go(stopped, tiny_runs.make(stopped), stop_at=30)
    stopped.snapshot.at = "newest"
    then = snapshots.take(stopped, tiny_runs.RECORDS, {})
    one, other = export.read_arrays(later), export.read_arrays(then)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert later.name == then.name == "pig_t5_adapter-step30-f16.gguf"


def test_snapshots_are_listed_with_their_scores(trained):
    settings, inputs, _ = trained
    for at in ("best", "10", "newest"):
        settings.snapshot.at = at
        snapshots.take(settings, tiny_runs.RECORDS, {})
    entries = export.Path(inputs.run / "snapshots.json")
    listed = snapshots.read_json(entries)["snapshots"]
    assert {10, 60} <= {entry["step"] for entry in listed}
    assert all(entry["eval"]["cos"] > 0 and Path(entry["path"]).exists() for entry in listed)


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(trained):
    settings, _, _ = trained
    settings.snapshot.at = "11"
    with pytest.raises(TrainerError, match="kept steps are 10, 20"):
        snapshots.take(settings, tiny_runs.RECORDS, {})


def test_a_snapshot_of_a_run_without_anything_is_refused_in_words(tmp_path):
    settings = tiny_runs.settings(tmp_path)
    with pytest.raises(TrainerError, match="is missing"):
        list(corpus_files.read(Path(settings.folder) / "corpus" / "val.jsonl"))
    with pytest.raises(TrainerError, match="no checkpoint yet"):
        snapshots.take(settings, tiny_runs.RECORDS, {})


def test_a_snapshot_never_says_that_a_synthetic_teacher_is_real(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=5)
    synthetic = settings.model_validate(settings.model_dump() | {"precompute": {"teacher": "synthetic"}})
    go(synthetic, tiny_runs.make(synthetic))
    with pytest.raises(TrainerError, match="trained on a synthetic teacher"):
        snapshots.take(settings, tiny_runs.RECORDS, {})
    tiny_runs.make(settings)  # real shards, and still the checkpoints of synthetic ones
    with pytest.raises(TrainerError, match="run training first"):
        snapshots.take(settings, tiny_runs.RECORDS, {})
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_value_too_large_for_f16_is_an_error_and_not_an_infinity(trained):
    _, inputs, _ = trained
    weights, scale = checkpoints.unpack(checkpoints.load(inputs.run / "checkpoints" / "best.safetensors")[0])
    weights["blocks.0.mlp.0.weight"][3, 4] = 7e4
    with pytest.raises(TrainerError, match=r"blocks\.0\.mlp\.0\.weight"):
        checkpoints.exported(weights, scale)


def test_another_runs_file_is_not_overwritten(trained):
    settings, inputs, out = trained
    before = out.read_bytes()
    other = settings.model_copy(update={"run": "other"})
    with pytest.raises(TrainerError, match="belongs to run tiny"):
        export.export_best(other, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    assert out.read_bytes() == before


def test_the_copy_spares_another_runs_file_and_a_folder_that_cannot_be_is_told_in_words(trained, tmp_path):
    settings, inputs, out = trained
    best = inputs.run / "checkpoints" / "best.safetensors"
    export_settings = settings.export.model_copy(update={"copy_to": str(tmp_path / "models"), "dir": str(tmp_path)})
    mine = settings.model_copy(update={"export": export_settings})
    export.export_best(mine, tiny_runs.RECORDS, best, tmp_path / out.name)
    copy = tmp_path / "models" / out.name
    assert copy.read_bytes() == out.read_bytes()
    other = mine.model_copy(update={"run": "other"})
    with pytest.raises(TrainerError, match="belongs to run tiny"):
        export.export_best(other, tiny_runs.RECORDS, best, tmp_path / "elsewhere" / out.name)
    assert copy.read_bytes() == out.read_bytes()
    export_settings.copy_to = str(copy)  # a file, no folder
    with pytest.raises(TrainerError, match=r"export\.copy_to cannot be used"):
        export.export_best(mine, tiny_runs.RECORDS, best, tmp_path / out.name)


def test_another_runs_file_is_not_scored_as_ones_own(trained):
    settings, inputs, out = trained
    other = settings.model_copy(update={"run": "other"})
    with pytest.raises(TrainerError, match="belongs to run tiny, not to run other: nothing was scored"):
        evaluation.evaluate(other, out, None, inputs.val, {})


def test_a_truncated_file_is_refused_in_words(trained, tmp_path):
    _, _, out = trained
    short = tmp_path / "short.gguf"
    short.write_bytes(out.read_bytes()[:2000])
    with pytest.raises(TrainerError, match="not a whole GGUF"):
        evaluation.load_adapter(short, torch.device("cpu"))


def test_a_synthetic_teacher_is_told_in_the_file_and_in_its_name(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=5)
    settings = settings.model_validate(settings.model_dump() | {"precompute": {"teacher": "synthetic"}})
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    out = Path(settings.gguf)
    export.export_best(settings, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    assert out.name == "pig_t5_adapter-synthetic-f16.gguf"
    assert export.read_keys(out)["adapter.teacher"] == "synthetic"
    assert "adapter.teacher_digest" not in gguf.GGUFReader(out).fields
