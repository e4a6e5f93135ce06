"""Publishing, with the hub's own client, to a hub on 127.0.0.1."""

import finished_run
import pytest
import torch
from fake_hub import WritableHub
from trainer import export, publishing
from trainer.card import write_card
from trainer.errors import TrainerError
from trainer.files import sha256
from workflow import Project

TOKEN = "hf_do_not_tell_anybody"


@pytest.fixture
def hub(monkeypatch):
    """A hub that the client of this process talks to; its large files go the way that needs no other server."""
    served = WritableHub(TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield served
    served.shutdown()
    served.server_close()


def gguf(path, run, teacher="owner/t5"):
    """A small file with the keys of an adapter, or of a companion."""
    noise = torch.rand(100, 100, generator=torch.Generator().manual_seed(len(path.name)))
    export.write(path, ["x"], {"x": noise}.__getitem__, {"adapter.run": run, "adapter.teacher": teacher})


@pytest.fixture
def finished(tmp_path):
    """A finished run with two files: its settings and its card."""
    folder, settings = finished_run.build(tmp_path, pack="llada_image", publish={"repository": "me/my-adapter"})
    for file in (settings.exported, settings.companion):
        (path := tmp_path / file).unlink(missing_ok=True)
        gguf(path, settings.run)
    write_card(folder, settings, folder / "README.md")
    return settings, folder / "README.md"


def refused(*arguments):
    with pytest.raises(TrainerError) as error:
        publishing.publish(*arguments)
    assert "\n" not in str(error.value)
    assert TOKEN not in str(error.value)
    return str(error.value)


def sent(hub):
    return [path.partition("?")[0].rpartition("/")[2] for method, path, _ in hub.requests if method == "PUT"]


def test_files_and_card_arrive_whole_in_one_commit_in_a_private_repository(hub, finished, tmp_path):
    settings, card = finished
    address = publishing.publish(settings, card)
    assert address.startswith(f"{hub.url}/me/my-adapter/commit/")
    assert (hub.created["organization"], hub.created["name"], hub.created["visibility"]) == (
        *("me", "my-adapter", "private"),
    )
    assert hub.files == {
        "README.md": card.read_bytes(),
        "pig_llada_adapter-f16.gguf": (tmp_path / settings.exported).read_bytes(),
        "pig_llada_adapter_sigvq-f16.gguf": (tmp_path / settings.companion).read_bytes(),
    }
    assert [it["summary"] for it in hub.commits] == ["Upload pig_llada_adapter-f16.gguf"]


def test_publishing_again_sends_and_commits_only_what_is_new(hub, finished):
    settings, card = finished
    publishing.publish(settings, card)
    publishing.publish(settings, card)
    assert (len(sent(hub)), len(hub.commits)) == (2, 1)
    settings.publish.license = "mit"
    write_card(card.parent, settings, card)
    publishing.publish(settings, card)
    assert (len(sent(hub)), len(hub.commits)) == (2, 2)
    assert b"license: mit" in hub.files["README.md"]


def test_an_upload_that_broke_off_leaves_no_commit_and_goes_on_with_what_is_missing(hub, finished):
    settings, card = finished
    first, second = sha256(settings.exported), sha256(settings.companion)
    hub.refused = {second}
    assert "run the same command again" in refused(settings, card)
    assert (hub.commits, hub.files) == ([], {})
    hub.refused = set()
    publishing.publish(settings, card)
    assert sent(hub).count(first) == 1
    assert len(hub.commits) == 1


def test_the_token_goes_to_the_hub_in_a_header_and_nowhere_else(hub, finished, capfd, tmp_path):
    publishing.publish(*finished)
    assert any(headers.get("authorization") == f"Bearer {TOKEN}" for _, _, headers in hub.requests)
    assert not [path for _, path, _ in hub.requests if TOKEN in path]
    assert not [headers for method, _, headers in hub.requests if method == "PUT" and "authorization" in headers]
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


@pytest.mark.parametrize(("status", "words"), [(401, "does not know the token"), (403, "may not write"), (500, "500")])
def test_what_the_hub_refuses_is_told_in_a_sentence(hub, finished, status, words):
    hub.status = status
    assert words in refused(*finished)
    assert not hub.files


def test_a_token_that_the_hub_does_not_know_is_told(hub, finished, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know the token in HF_TOKEN" in refused(*finished)


def test_nothing_is_uploaded_without_a_repository_a_token_or_a_real_teacher(hub, finished, monkeypatch, tmp_path):
    settings, card = finished
    gguf(tmp_path / settings.exported, settings.run, teacher="synthetic")
    write_card(card.parent, settings, card)
    assert "synthetic teacher" in refused(settings, card)
    settings.precompute.teacher = "synthetic"
    assert "synthetic teacher" in refused(settings, card)
    settings.precompute.teacher = "real"
    settings.publish.repository = None
    assert "publish={repository: me/my-adapter}" in refused(settings, card)
    settings.publish.repository = "me/my-adapter"
    monkeypatch.delenv("HF_TOKEN")
    assert "set HF_TOKEN in the environment" in refused(settings, card)
    assert hub.requests == []


def test_a_file_of_another_run_or_of_another_card_is_not_uploaded(hub, finished, tmp_path):
    settings, card = finished
    path = tmp_path / settings.exported
    path.unlink()
    gguf(path, "another")
    assert "belongs to run another" in refused(settings, card)
    path.write_bytes(b"no GGUF")
    assert "tells of another file" in refused(settings, card)
    assert hub.requests == []


def test_a_refusal_is_told_before_anything_is_computed_and_already_by_a_dry_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    made = Project(tmp_path, {"pack": "pixart", "run": "r"})
    dry = made.snakemake("--dry-run", "publish")
    assert "publish needs a repository: add --config 'publish={repository: me/my-adapter}'" in dry
    assert "precompute" not in dry
    output = made.snakemake("publish", fails=True)
    assert "error: publish needs a repository" in output
    assert "Traceback" not in output
    assert TOKEN not in dry + output
