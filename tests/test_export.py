"""The exported file: the engine's layout, the checkpoint's answers, nothing lost."""

import functools
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_runs
import torch
from safetensors.torch import load_file, save_file
from test_training import go
from trainer import adapters, checkpoints, config, corpus_files, evaluation, export, packs, scoring, snapshots
from trainer.errors import TrainerError
from trainer.files import read_json
from trainer.materials import Record
from trainer.shards import Shard


def train_and_export(folder, pack):
    settings = tiny_runs.settings(folder, pack, steps=60, keep_every=10, lr=3e-3)
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    out = Path(settings.exported)
    export.export_best(settings, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    return settings, inputs, out


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Trained and exported runs of packs, each made when it is first wanted."""
    return functools.cache(lambda pack: train_and_export(tmp_path_factory.mktemp(pack), pack))


@pytest.fixture
def trained(every):
    return every("pixart")


@pytest.fixture(params=tiny_runs.PACKS)
def either(every, request):
    return every(request.param)


def expected_layout(width, depth, student, teacher, queries=None, vocabulary=None, vision=None):
    """contracts: names, torch shapes and types of an adapter: a resampler if it has queries, else token aligned."""
    f16, f32 = np.float16, np.float32

    def linear(name, rows, columns):
        return {f"{name}.weight": ((rows, columns), f16), f"{name}.bias": ((rows,), f32)}

    layout = linear("in_proj", width, student) | linear("out_proj", teacher, width)
    layout |= {f"ln_out.{part}": ((width,), f32) for part in ("weight", "bias")}
    layout |= {"query": ((queries, width), f32)} if queries else linear("skip", teacher, student)
    layout |= {"t5_embed.weight": ((vocabulary, width), f16)} if vocabulary else {}
    if vision:
        layout |= {"vision_proj.weight": ((student, vision), f32), "vis_in.weight": ((width, vision), f16)}
    for n in range(depth):
        for norm in ("ln_self", "ln_q", "ln_kv", "ln_mlp") if queries else ("ln_self", "ln_mlp"):
            layout |= {f"blocks.{n}.{norm}.{part}": ((width,), f32) for part in ("weight", "bias")}
        for attention in ("self_attn", "cross_attn") if queries else ("self_attn",):
            for part in "qkvo":
                layout |= linear(f"blocks.{n}.{attention}.{part}", width, width)
        layout |= linear(f"blocks.{n}.mlp.0", 4 * width, width) | linear(f"blocks.{n}.mlp.2", width, 4 * width)
    return {f"adapter.{name}": value for name, value in layout.items()}


KINDS = {
    "pixart": "seeded_resampler",
    "llada_image": "resampler",
    "mageflow": "token_aligned_vision",
    "qwen_image": "token_aligned_vision",
}


def test_names_shapes_and_types_are_the_engines(either):
    settings, _, out = either
    found = {name: (array.shape, array.dtype.type) for name, array in export.read_arrays(out).items()}
    shape = settings.adapter
    sizes = shape.queries, shape.vocabulary, shape.vision_dim
    assert found == expected_layout(64, 1, tiny_runs.STUDENT, tiny_runs.TEACHER, *sizes)
    keys = export.read_keys(out)
    assert keys["adapter.kind"] == KINDS[settings.pack]
    found = tuple(keys.get(f"adapter.{name}") for name in ("num_queries", "t5_vocab", "vis_dim"))
    assert found == sizes


def test_a_full_size_file_has_as_many_tensors_as_published_ones():
    assert len(expected_layout(1024, 6, 1024, 4096, 120, 32128)) == 176  # PixArt
    assert len(expected_layout(1024, 6, 1024, 2560, 256)) == 175  # LLaDA-Image
    for dim in (2560, 4096):  # MageFlow, Qwen-Image: 28 in f16, 46 in f32
        types = [kind for _, kind in expected_layout(1024, 4, 1024, dim, vision=dim).values()]
        assert (types.count(np.float16), types.count(np.float32)) == (28, 46)


def test_the_vision_packs_say_what_they_were_made_from(every):
    mageflow, qwen = (export.read_keys(every(pack)[2]) for pack in ("mageflow", "qwen_image"))
    assert mageflow["adapter.teacher_tap"] == "final_norm"
    assert qwen["adapter.teacher_tap"] == "pre_norm_last_layer"
    assert qwen["adapter.teacher_deepstack"] is True
    assert qwen["adapter.vision_contract"] == "qwen_image_2_1"
    assert qwen["adapter.supervised_rows"] == "consumed_text"
    assert "adapter.teacher_deepstack" not in mageflow


@pytest.mark.parametrize("pack", ["mageflow", "qwen_image"])
def test_what_maps_pictures_into_the_student_is_handed_on_as_it_came(every, pack):
    _, inputs, out = every(pack)
    given = load_file(inputs.given["vision_proj"])["weight"]
    assert np.array_equal(export.read_arrays(out)["adapter.vision_proj.weight"], given.numpy())
    state = load_file(inputs.run / "checkpoints" / "state.safetensors")
    assert torch.equal(state["model.vision_proj.weight"], given)
    assert "optimizer.vision_proj.weight/exp_avg" not in state
    assert "optimizer.vis_in.weight/exp_avg" in state


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("seeded_resampler", {"queries": 12, "vocabulary": 50}),
        ("resampler", {"queries": 12}),
        ("token_aligned_vision", {"vision_dim": 40}),
        ("token_aligned", {}),
    ],
)
def test_an_adapter_is_known_from_the_names_and_shapes_of_its_tensors(kind, shape):
    adapter = adapters.fresh(config.Adapter(student_dim=32, teacher_dim=48, width=128, depth=2, **shape))
    tensors = adapter.state_dict()
    assert adapters.kind(tensors) == kind
    found = adapters.of({name: tensor.half() for name, tensor in tensors.items()})
    assert {n: t.shape for n, t in found.state_dict().items()} == {n: t.shape for n, t in tensors.items()}
    with pytest.raises(RuntimeError, match=r"blocks\.1\.mlp\.0\.bias"):
        adapters.of({n: t for n, t in tensors.items() if n != "blocks.1.mlp.0.bias"})


@pytest.mark.parametrize("pack", tiny_runs.PACKS)
def test_standardization_folds_away_exactly(every, pack):
    """Folded weights on raw rows give what unfolded ones give on standardized rows, in f64."""
    settings, inputs, _ = every(pack)
    weights, scale = checkpoints.unpack(checkpoints.load(inputs.run / "checkpoints" / "best.safetensors")[0])
    shard = Shard(inputs.val[0])
    batch = tiny_runs.batch(shard, range(7), settings.adapter.queries)
    batch = batch._each(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    wide = {name: tensor.double() for name, tensor in scale.tensors().items()}
    vision = None if batch.vision is None else batch.vision / wide["vision_rms"]
    student = (batch.student - wide["student_mean"]) / wide["student_std"]
    plain = adapters.of(weights).double()(replace(batch, student=student, vision=vision))
    folded = adapters.of(weights).double()
    folded.load_state_dict(scale.fold(weights, torch.float64))
    difference = (folded(batch) - (plain * wide["target_std"] + wide["target_mean"])).abs().max()
    assert difference < 1e-9 * wide["target_mean"].abs().max()


def plain_forward(tensors, row):
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

    student = row.student.double()
    kv = linear(student, "in_proj")
    if "query" in t:
        x = t["query"]
        if row.slots:
            x = x + t["t5_embed.weight"][torch.tensor(row.slots + [0] * (len(x) - len(row.slots)))]
    else:
        dense = torch.zeros(len(kv), row.vision.shape[1], dtype=torch.float64)
        dense[row.vision_at] = row.vision.double()
        x = kv + dense @ t["vis_in.weight"].T
    depth = 1 + max(int(name.split(".")[1]) for name in t if name.startswith("blocks."))
    for n in range(depth):
        own = norm(x, f"blocks.{n}.ln_self")
        x = x + attention(own, own, f"blocks.{n}.self_attn")
        if "query" in t:
            x = x + attention(norm(x, f"blocks.{n}.ln_q"), norm(kv, f"blocks.{n}.ln_kv"), f"blocks.{n}.cross_attn")
        hidden = linear(norm(x, f"blocks.{n}.ln_mlp"), f"blocks.{n}.mlp.0")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + linear(hidden, f"blocks.{n}.mlp.2")
    rows = linear(norm(x, "ln_out"), "out_proj")
    return rows[: len(row.target)] if "query" in t else (rows + linear(student, "skip"))[row.target_at]


def test_the_file_answers_as_the_checkpoint_does_to_f16_rounding(either):
    settings, inputs, out = either
    weights, scale = checkpoints.unpack(checkpoints.load(inputs.run / "checkpoints" / "best.safetensors")[0])
    ours = adapters.of(weights)
    arrays = export.read_arrays(out)
    shard = Shard(inputs.val[0])
    for number in range(5):
        row = tiny_runs.read(shard)[number]
        batch = tiny_runs.batch(shard, [number], settings.adapter.queries)
        mine = scoring.predictor(ours, scale)(batch)
        from_file = plain_forward(arrays, row).float()
        mean = scale.target_mean
        assert (mine - from_file).abs().max() < 5e-3 * (mine - mean).abs().max()


def test_evaluation_gives_the_figure_of_training(either):
    settings, inputs, out = either
    metric = packs.get(settings.pack).metric
    best = inputs.run / "checkpoints" / "best.safetensors"
    mean = checkpoints.load(best)[0]["scale.target_mean"]
    result = evaluation.evaluate(settings, out, mean, best, inputs.val, {})
    metrics = result["metrics"]
    assert metrics[metric] == pytest.approx(checkpoints.read_meta(best)["val"][metric], abs=1e-4)
    assert export.read_keys(out)["adapter.val_cos"] == pytest.approx(metrics[metric], abs=1e-4)
    assert metrics["roundtrip_cos"] > 0.99999
    assert metrics[metric] > metrics["baseline_cos"] + 0.1
    assert metrics["baseline_cos"] == 0 or metric != "cos_centered"
    assert ("cos_eos" in metrics) == (settings.pack == "pixart")
    assert result["worst"][0]["cos"] == min(sample["cos"] for sample in result["worst"]) < metrics[metric]
    assert result["val_rows"] == inputs.index["val"]["rows"]


def test_each_kind_of_probe_prompts_has_the_figure_it_would_have_alone(either, tmp_path):
    settings, inputs, out = either
    metric = packs.get(settings.pack).metric
    mean = checkpoints.load(inputs.run / "checkpoints" / "best.safetensors")[0]["scale.target_mean"]
    rows = tiny_runs.sample_rows(settings.pack, 30, 5)
    kinds = {"word": rows[:8], "tags": rows[8:30]}
    samples = {
        row.id: corpus_files.Sample(row.id, f"{kind} {row.id}", kind) for kind, own in kinds.items() for row in own
    }
    files = [tmp_path / f"0000-{number:02d}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        tiny_runs.write_shard(file, rows[number::2])
    result = evaluation.evaluate(settings, out, mean, None, inputs.val, samples, files)
    assert result["probe"].keys() == kinds.keys()
    for kind, own in kinds.items():
        tiny_runs.write_shard(tmp_path / "alone.safetensors", own)
        alone = evaluation.evaluate(settings, out, mean, None, [tmp_path / "alone.safetensors"], samples)
        found = result["probe"][kind]
        assert found["samples"] == len(own)
        assert found["cos"] == pytest.approx(alone["metrics"][metric], abs=1e-5)
        assert found["baseline_cos"] == pytest.approx(alone["metrics"]["baseline_cos"], abs=1e-5)
        assert found["worst"] == alone["worst"][0] | {"cos": pytest.approx(alone["worst"][0]["cos"], abs=1e-5)}
        assert found["worst"]["text"].startswith(kind)
    figures = [found["cos"] for found in result["probe"].values()]
    assert result["metrics"]["probe_cos"] == pytest.approx(sum(figures) / 2)
    plain = evaluation.evaluate(settings, out, mean, None, inputs.val, samples)
    assert (plain["probe"], plain["metrics"].get("probe_cos")) == ({}, None)
    assert plain["metrics"] == {name: value for name, value in result["metrics"].items() if name != "probe_cos"}


def test_a_damaged_probe_shard_is_not_scored_and_is_rebuilt_the_next_time(trained, tmp_path):
    settings, inputs, out = trained
    shard = tmp_path / "0000-00.safetensors"
    tiny_runs.write_shard(shard, tiny_runs.rows(5, 5))
    content = bytearray(shard.read_bytes())
    content[-10] ^= 4
    shard.write_bytes(content)
    (tmp_path / "0000.json").touch()
    with pytest.raises(TrainerError, match=r"0000-00\.safetensors is damaged"):
        evaluation.evaluate(settings, out, torch.zeros(tiny_runs.TEACHER), None, inputs.val, {}, [shard])
    assert not (tmp_path / "0000.json").exists()


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


def test_a_kept_step_exports_bit_for_bit_what_a_snapshot_at_that_step_would_have_been(either, tmp_path):
    settings, _inputs, _ = either
    settings.snapshot.at = "30"
    later = snapshots.take(settings, tiny_runs.RECORDS, {})
    stopped = tiny_runs.settings(tmp_path, settings.pack, steps=60, lr=3e-3)
    with pytest.raises(TrainerError, match="stopped at step 30"):
        go(stopped, tiny_runs.make(stopped), stop_at=30)
    stopped.snapshot.at = "newest"
    then = snapshots.take(stopped, tiny_runs.RECORDS, {})
    one, other = export.read_arrays(later), export.read_arrays(then)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert later.name == then.name == f"{packs.get(settings.pack).file_name}-step30-f16.gguf"
    (one,), (other,) = (
        [s["eval"] for s in read_json(Path(made.folder) / "snapshots.json")["snapshots"] if s["step"] == 30]
        for made in (settings, stopped)
    )
    assert one == other


def test_snapshots_are_listed_with_their_scores(trained):
    settings, inputs, _ = trained
    for at in ("best", "10", "newest"):
        settings.snapshot.at = at
        snapshots.take(settings, tiny_runs.RECORDS, {})
    listed = read_json(inputs.run / "snapshots.json")["snapshots"]
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
        evaluation.evaluate(other, out, torch.zeros(tiny_runs.TEACHER), None, inputs.val, {})


def test_a_truncated_file_is_refused_in_words(trained, tmp_path):
    _, _, out = trained
    short = tmp_path / "short.gguf"
    short.write_bytes(out.read_bytes()[:2000])
    with pytest.raises(TrainerError, match="not a whole GGUF"):
        evaluation.load_adapter(short, torch.device("cpu"))


def test_a_token_aligned_pack_without_pictures_goes_all_the_way(tmp_path, monkeypatch):
    plain = replace(packs.get("mageflow"), name="plain", vision_dim=None)
    monkeypatch.setitem(packs._PACKS, "plain", plain)
    settings, inputs, out = train_and_export(tmp_path / "a", "plain")
    assert inputs.given == {}
    found = {name: (array.shape, array.dtype.type) for name, array in export.read_arrays(out).items()}
    assert found == expected_layout(64, 1, tiny_runs.STUDENT, tiny_runs.TEACHER)
    assert export.read_keys(out)["adapter.kind"] == "token_aligned"
    best = inputs.run / "checkpoints" / "best.safetensors"
    mean = checkpoints.load(best)[0]["scale.target_mean"]
    metrics = evaluation.evaluate(settings, out, mean, best, inputs.val, {})["metrics"]
    assert metrics["cos_slice"] > metrics["baseline_cos"] + 0.1
    assert metrics["cos_slice"] == metrics["cos_t2i"]
    assert not {"cos_edit", "cos_vis", "cos_txt"} & metrics.keys()
    broken = tiny_runs.settings(tmp_path / "b", "plain", steps=60, lr=3e-3)
    again = tiny_runs.make(broken)
    with pytest.raises(TrainerError, match="stopped at step 23"):
        go(broken, again, stop_at=23)
    go(broken, again)
    one, other = (load_file(run / "checkpoints" / "best.safetensors") for run in (inputs.run, again.run))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("pack", ["mageflow", "qwen_image"])
def test_no_row_of_padding_is_computed(every, pack):
    """Samples of very different lengths: each matrix is multiplied with rows of tokens only."""
    settings, inputs, _ = every(pack)
    adapter = adapters.fresh(settings.adapter)
    shard = Shard(inputs.val[0])
    batch = tiny_runs.batch(shard, range(20), None).widened()
    rows = {}
    for name, module in adapter.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, given, made, name=name: rows.update({name: len(made)}))
    adapter(batch)
    wanted = {"vis_in": sum(batch.seen), "out_proj": len(batch.target), "skip": len(batch.target)}
    assert rows == {name: wanted.get(name, sum(batch.lengths)) for name in rows}
    assert len(set(batch.lengths)) > 5


def test_a_sample_is_read_by_itself(every):
    """Neither the other samples of its batch nor their order change a sample's rows."""
    _, inputs, out = every("mageflow")
    adapter, shard = evaluation.load_adapter(out, torch.device("cpu")), Shard(inputs.val[0])
    together = adapter(tiny_runs.batch(shard, range(8), None).widened())
    for number, rows in enumerate(together.split([len(row.target) for row in tiny_runs.read(shard)[:8]])):
        torch.testing.assert_close(
            rows, adapter(tiny_runs.batch(shard, [number], None).widened()), atol=1e-4, rtol=1e-4
        )


def test_a_synthetic_teacher_is_told_in_the_file_and_in_its_name(tmp_path):
    settings = tiny_runs.settings(tmp_path, steps=5)
    settings = settings.model_validate(settings.model_dump() | {"precompute": {"teacher": "synthetic"}})
    inputs = tiny_runs.make(settings)
    go(settings, inputs)
    out = Path(settings.exported)
    export.export_best(settings, tiny_runs.RECORDS, inputs.run / "checkpoints" / "best.safetensors", out)
    assert out.name == "pig_t5_adapter-synthetic-f16.gguf"
    assert export.read_keys(out)["adapter.teacher"] == "synthetic"
    assert "adapter.teacher_digest" not in gguf.GGUFReader(out).fields


def sigvq(folder, **tensors):
    """A snapshot like SigVQ's, in two files, and its record."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "visual.patch_embed.proj.weight": (8, 3, 4, 4),
        "visual.blocks.0.norm1.weight": (8,),
        "vqmodel.quantize.embedding.weight": (40, 8),
    }
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()} | tensors
    names = [f"sigvq/diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (folder / "sigvq").mkdir(parents=True)
    for n, name in enumerate(names):
        save_file(dict(list(made.items())[n::2]), folder / name)
    files = [{"name": name, "bytes": 1, "sha256": "0"} for name in ["sigvq/config.json", *names]]
    record = Record(
        "sigvq", "hub", "t", "companion", str(folder), "path", "example/llada", "b" * 40, None, None, files, "d3"
    )
    return made, record


def test_the_companion_has_every_tensor_under_its_own_name_in_f16(tmp_path):
    settings = tiny_runs.settings(tmp_path, "llada_image")
    made, record = sigvq(tmp_path / "snapshot")
    out = Path(settings.companion)
    assert out.name == "pig_llada_adapter_sigvq-f16.gguf"
    settings.export.copy_to = str(tmp_path / "models")
    export.export_companion(settings, record, out)
    found = export.read_arrays(out)
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == np.float16
        assert np.array_equal(found[name], tensor.half().numpy())
    keys = export.read_keys(out)
    assert (keys["general.architecture"], keys["companion.repository"]) == ("pig", "example/llada")
    assert (tmp_path / "models" / out.name).read_bytes() == out.read_bytes()
    other = settings.model_copy(update={"run": "other"})
    with pytest.raises(TrainerError, match="belongs to run tiny"):
        export.export_companion(other, record, out)


def test_a_companion_that_f16_cannot_hold_is_refused_and_not_written(tmp_path):
    settings = tiny_runs.settings(tmp_path, "llada_image")
    _, record = sigvq(tmp_path / "snapshot", large=torch.tensor([1.0, 7e4]))
    with pytest.raises(TrainerError, match=r"tensor large of .* has a value that f16 cannot hold"):
        export.export_companion(settings, record, Path(settings.companion))
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_companion_is_written_only_where_there_is_one_and_it_is_wanted(tmp_path):
    assert tiny_runs.settings(tmp_path).companion is None
    wanted = tiny_runs.settings(tmp_path, "llada_image").model_dump()
    for change in ({"export": wanted["export"] | {"companion": False}}, {"precompute": {"teacher": "synthetic"}}):
        assert config.load(wanted | change).companion is None
