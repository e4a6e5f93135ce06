"""The card of an adapter: what it says, and what it never does."""

import json

import finished_run
import pytest
from huggingface_hub import ModelCard
from trainer.card import write_card
from trainer.files import sha256


def written(folder, settings):
    out = folder / "README.md"
    write_card(folder, settings, out)
    return out.read_text(encoding="utf-8")


@pytest.fixture
def pixart(tmp_path):
    """A finished run of pixart; its teacher and prompts are of the hub."""
    folder, settings = finished_run.build(
        tmp_path / "secret place", pack="pixart", corpus={"files": ["/home/me/clients/mine.txt"]}
    )
    records = json.loads((folder / "materials.json").read_text())["materials"]
    teacher, student = records
    teacher |= {"kind": "hub", "repository": "owner/t5", "revision": "c" * 40, "package": None, "version": None}
    student |= {"kind": "file", "repository": None, "revision": None, "path": "/home/me/models/pig_clip-f16.gguf"}
    prompts = teacher | {"id": "prompts-gustavosta", "role": "prompts", "repository": "owner/prompts"}
    (folder / "materials.json").write_text(json.dumps({"materials": [teacher, student, prompts]}))
    corpus = json.loads((folder / "corpus.json").read_text())
    corpus["sources"] = {"/home/me/clients/a|b `c`.txt": {"read": 310, "train": 250, "val": 28}}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    (folder / "materials").mkdir()
    (folder / "materials" / "teacher.lock.json").write_text(json.dumps({"license": "apache-2.0"}))
    return folder, settings


def test_the_hub_reads_origin_and_figures_from_the_cards_metadata(pixart):
    folder, settings = pixart
    settings.publish.license = "mit"
    data = ModelCard(written(folder, settings)).data
    assert data.base_model == ["owner/t5"]
    assert data.datasets == ["owner/prompts"]
    assert (data.license, data.pipeline_tag, data.library_name) == ("mit", "text-to-image", "gguf")
    assert {"ggk", "pixart", "adapter"} <= set(data.tags)
    assert data.model_name == "pig_t5_adapter"
    found = [(it.dataset_type, it.metric_type, it.metric_name, it.metric_value) for it in data.eval_results]
    assert ("validation-prompts", "cosine_similarity", "validation cosine", 0.969731) in found
    assert ("validation-prompts", "cosine_similarity", "mean baseline", 0.4021) in found
    assert ("probe-prompts", "cosine_similarity", "cosine", 0.7325) in found


def test_a_card_has_command_figures_training_origin_and_licences(pixart):
    folder, settings = pixart
    card = written(folder, settings)
    for text in (
        *(
            "--llm-adapter pig_t5_adapter-f16.gguf",
            sha256(settings.exported),
            "| a single word | 40 | 0.6100 | 0.3500 |",
        ),
        *("| **validation cosine** | **0.9697** |", "| relative error (`rel_mse`) | 0.0611 |", "600 of 600 steps"),
        *("c" * 40, "apache-2.0, as its repository says", "None was chosen for this file.", "`pig_clip-f16.gguf`"),
    ):
        assert text in card
    student = next(line for line in card.splitlines() if "| student |" in line)
    assert student.endswith("| not known |")
    assert "no use" not in card


def test_a_card_names_no_place_of_this_machine_and_the_same_run_gives_the_same_bytes(pixart):
    card = written(*pixart)
    assert not [word for word in ("/home", "/me", "clients", "secret place", str(pixart[0])) if word in card]
    assert r"| `a\|b 'c'.txt` | 310 | 250 | 28 |" in card
    assert written(*pixart) == card


def test_a_card_of_a_synthetic_teacher_says_first_that_the_file_is_of_no_use(tmp_path):
    card = written(*finished_run.build(tmp_path, pack="pixart", precompute={"teacher": "synthetic"}))
    assert card.index("is of no use") < card.index("## Use")
    assert "ggk diffuser" not in card
    data = ModelCard(card).data
    assert data.pipeline_tag is None
    assert "ggk" not in data.tags


def test_a_demonstration_is_called_one_and_licences_of_packages_are_told(tmp_path):
    folder, settings = finished_run.build(tmp_path)
    materials = json.loads((folder / "materials.json").read_text())
    materials["materials"][0]["package"] = "pytest"  # one that is installed wherever tests run
    (folder / "materials.json").write_text(json.dumps(materials))
    card = written(folder, settings)
    assert "No image engine reads this file" in card
    assert "MIT, as its package says" in card


def test_a_card_tells_of_the_second_file_and_of_its_licence(tmp_path):
    folder, settings = finished_run.build(tmp_path, pack="llada_image")
    (folder / "materials").mkdir()
    (folder / "materials" / "sigvq.lock.json").write_text(json.dumps({"license": "mit"}))
    card = written(folder, settings)
    assert "--llm_vision pig_llada_adapter_sigvq-f16.gguf" in card
    assert "`inclusionAI/LLaDA-Image-Turbo` under their own license (mit, as its repository says)" in card
    settings.export.companion = False
    assert "sigvq" not in written(folder, settings)
