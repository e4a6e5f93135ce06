"""Whole runs of the packs that read pictures, with the real snakemake command line and tiny Qwen3-VL models."""

import pytest
import tiny_models
import tiny_pictures
from trainer import export, probe
from workflow import SUBJECTS, Project, prompts

TOKENS, PICTURE, DIM = 151674, 151655, 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny Qwen3-VL and a tiny student, which share the real tokenizer: the templates are counted in its tokens."""
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    folder = tmp_path_factory.mktemp("models")
    shape = tiny_models.qwen3(hidden=DIM, vocabulary=TOKENS)
    return {
        "teacher": tiny_models.qwen3_vl_snapshot(folder / "teacher", hidden=DIM, vocabulary=TOKENS, picture_id=PICTURE),
        "tokenizer": tiny_models.qwen2_tokenizer(folder / "tokenizer", merges=None),
        "student": tiny_models.student_gguf(folder / "pig_clip-f16.gguf", shape),
    }


def project(folder, pack, models, broken=()):
    """48 pictures with captions in two folders with the same file names, and prompts; `broken` ones are cut short."""
    for number in range(48):
        path = folder / "ab"[number % 2] / f"{number // 2:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = tiny_pictures.encoded(tiny_pictures.picture(number, (64 + 32 * (number % 3), 96)))
        path.write_bytes(content[: len(content) // 2] if number in broken else content)
        path.with_suffix(".txt").write_text(f"a {SUBJECTS[number % 10]} {number} on a table\n")
    (folder / "prompts.txt").write_text("\n".join(prompts(60)) + "\n")
    made = Project(
        folder / "p",
        {
            "pack": pack,
            "run": "tiny",
            "materials": {"paths": {name: str(path) for name, path in models.items()}},
            "corpus": {
                "presets": [],
                "files": [str(folder / "prompts.txt")],
                "image_presets": [],
                "image_folders": [str(folder / "a"), str(folder / "b")],
                **{"n_image": 30, "n_two": 4, "n_text": 14, "n_val_image": 8, "n_val_text": 8, "val_fraction": 0.2},
            },
            "precompute": {"device": "cpu", "shard_size": 16, "block_shards": 2},
            "adapter": {"width": 64, "depth": 1, "student_dim": DIM, "teacher_dim": DIM, "vision_dim": DIM},
            "train": {"steps": 40, "batch_size": 8, "val_every": 10, "save_every": 10, "warmup": 4, "device": "cpu"},
            "evaluate": {"device": "cpu"},
        },
        pack,
    )
    if pack == "qwen_image":
        made.write(precompute={"reference_areas": [[4096, 0.5], [9216, 0.5]], "two_image_max_area": 4096})
    return made


@pytest.mark.parametrize(("pack", "rows"), [("mageflow", "all"), ("qwen_image", "consumed_text")])
def test_a_pack_with_pictures_runs_from_folders_to_its_file(tmp_path, models, pack, rows):
    """A twentieth of the pictures is broken: they are left out, counted and listed."""
    made = project(tmp_path, pack, models, broken=(3, 20))
    assert made.planned()["vision_proj"] == 1
    made.snakemake()
    assert made.planned() == {}
    corpus = made.json("corpus.json")["pictures"]
    assert corpus["unreadable"] == 2
    assert sorted(row["name"] for row in corpus["skipped"]) == ["01.png", "10.png"]
    result = made.json("eval.json")
    assert result["kind"].startswith("token_aligned")
    assert {"cos_slice", "cos_edit", "cos_t2i", "rel_mse"} <= result["metrics"].keys()
    assert ("cos_vis" in result["metrics"]) == (rows == "all")
    assert result["metrics"]["roundtrip_cos"] > 0.9999
    assert {kind: found["samples"] for kind, found in result["probe"].items()} == dict.fromkeys(probe.KINDS, 40)
    (file,) = (made.folder / "runs").glob("*-f16.gguf")
    shapes = {name.removeprefix("adapter."): array.shape for name, array in export.read_arrays(file).items()}
    assert shapes["vision_proj.weight"] == (DIM, DIM)
    assert shapes["vis_in.weight"] == (64, DIM)
    assert shapes["skip.weight"] == (DIM, DIM)
    assert export.read_keys(file)["adapter.vis_dim"] == DIM
    report = (made.run / "report.html").read_text()
    assert "data:image/jpeg" in report


def test_a_folder_of_mostly_broken_pictures_stops_before_any_model_is_loaded(tmp_path, models):
    made = project(tmp_path, "mageflow", models, broken=range(29))
    output = made.snakemake(fails=True)
    assert "pictures" in output
    assert "max_bad_pictures" in output
    assert "Traceback" not in output
    assert not list(made.run.glob("shards/*/*"))
