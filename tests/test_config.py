"""Settings: mistakes are one sentence with a way out; what does not matter invalidates nothing."""

import pytest
import yaml
from trainer import config, packs
from trainer.errors import TrainerError
from workflow import CHECKOUT


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"stepz": 3}}, "`train.stepz` does not exist; did you mean `train.steps`?"),
        ({"trian": {}}, "did you mean `train`?"),
        ({"train": {"lr": "fast"}}, "`train.lr` is 'fast'"),
        ({"train": {"lr": "nan"}}, "`train.lr`"),
        ({"train": {"steps": 0}}, "`train.steps` is 0"),
        ({"pack": "pixar"}, "the packs are demo, pixart, llada_image, mageflow, qwen_image, sdxl_lora"),
        ({"adapter": {"width": 100}}, "multiple of 64"),
        ({"corpus": {"presets": ["unknown"]}}, "gustavosta"),
        ({"corpus": {"presets": []}}, "no prompts"),
        ({"corpus": {"train_file": "a.txt"}}, "go together"),
        ({"run": "../elsewhere"}, "`run`"),
        ({"pack": "llada_image", "adapter": {"vocabulary": 50}}, "adapters of pack llada_image have none: remove it"),
        ({"pack": "mageflow", "adapter": {"queries": 9}}, "adapter.queries is set, and adapters of pack mageflow have"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(given, words):
    with pytest.raises(TrainerError) as caught:
        config.load(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_arrive_as_strings_are_understood():
    settings = config.load(
        {"train": {"steps": "12000", "lr": "2e-4"}, "snapshot": {"evaluate": "false", "at": 400}, "run": "null"}
    )
    assert (settings.train.steps, settings.train.lr) == (12000, 2e-4)
    assert settings.snapshot.evaluate is False
    assert settings.snapshot.at == "400"
    assert settings.run == "demo"


@pytest.mark.parametrize("pack", packs.names())
def test_resolved_settings_load_to_themselves(pack):
    shipped = yaml.safe_load((CHECKOUT / "packs" / pack / "pack.yaml").read_text())
    made_up = {"teacher": "synthetic"} if "adapters" in packs.get(pack).kinds else {}
    settings = config.load(shipped | {"precompute": shipped.get("precompute", {}) | made_up})
    assert config.load(settings.model_dump()) == settings


def test_a_pack_without_a_vocabulary_has_no_seed_table(tmp_path):
    config.write_stage_settings(config.load({"pack": "llada_image", "runs_dir": str(tmp_path)}))
    assert "seed_table.json" not in [path.name for path in (tmp_path / "llada_image/settings").iterdir()]


def test_stage_settings_are_rewritten_only_when_they_change_and_only_their_own(tmp_path):
    base = {"runs_dir": str(tmp_path)}
    config.write_stage_settings(config.load(base))
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "demo/settings").iterdir()}
    config.write_stage_settings(config.load(base | {"train": {"lr": 2e-3, "log_every": 7}}))
    changed = {p.name for p in (tmp_path / "demo/settings").iterdir() if p.stat().st_mtime_ns != files[p.name]}
    assert changed == {"train.json", "run.json"}  # run.json, which no rule reads, has all
    config.write_stage_settings(config.load(base | {"train": {"lr": 2e-3, "steps": 5}}))
    assert (tmp_path / "demo/settings/plan.json").read_text() == '{\n  "steps": 5\n}\n'


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        ("precompute", {"corpus": {"n_train": 120000}}),  # also where there are no more prompts than before
        ("seed_table", {"adapter": {"vocabulary": 500}}),
        ("seed_table", {"adapter": {"teacher_dim": 500}}),
    ],
)
def test_what_a_stage_depends_on_is_in_its_settings(tmp_path, stage, groups):
    base = {"runs_dir": str(tmp_path)}
    file = tmp_path / "demo" / "settings" / f"{stage}.json"
    config.write_stage_settings(config.load(base))
    before = file.read_text()
    config.write_stage_settings(config.load(base | groups))
    assert file.read_text() != before


def test_the_plan_is_read_from_the_last_file_that_has_it_and_from_the_command_line_first(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("train: {steps: 100}")
    two.write_text("train: {lr: 0.1}")
    assert config.read_steps([str(one), str(two)], {}, 7) == 100
    two.write_text("train: {steps: 200}")
    assert config.read_steps([str(one), str(two)], {}, 7) == 200
    assert config.read_steps([str(one)], {"train": {"steps": "300"}}, 7) == 300
    two.write_text("train: [unclosed")
    assert config.read_steps([str(one), str(two)], {}, 7) == 7
    two.write_text("")  # as an editor leaves it for a moment
    assert config.read_steps([str(one), str(two)], {}, 7) == 7
    two.write_text("train: {steps: many}")
    with pytest.raises(TrainerError, match="many"):
        config.read_steps([str(one), str(two)], {}, 7)


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    corpus = config.load({"corpus": {"presets": [], "files": ["~/prompts.txt"]}}).corpus
    assert corpus.files == ["/home/me/prompts.txt"]
