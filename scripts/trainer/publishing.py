"""The `publish` target: an adapter and its card in a repository of the Hugging Face hub."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from trainer import packs
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.files import sha256
from trainer.packs.base import LoraPack


def refusal(settings: Settings) -> str | None:
    """Why a run will not be published, as far as its settings and this process tell; light, for the Snakefile."""
    if settings.precompute.teacher == "synthetic":
        return (
            f"run {settings.run} has a synthetic teacher, and its adapter is of no use: nothing is uploaded; set "
            "precompute.teacher to real"
        )
    if not settings.publish.repository:
        return (
            "publish needs a repository: add --config 'publish={repository: me/my-adapter}', or set "
            "publish.repository in your settings"
        )
    if not os.environ.get("HF_TOKEN"):
        return "publish needs a token that may write: set HF_TOKEN in the environment, and nowhere else"
    return None


def publish(settings: Settings, card: Path) -> str:
    """Upload the exported files, their card as README.md and a companion as one commit; gives its address.

    A repository that is not there is made, a private one. What the repository has already is not sent again, and where
    nothing is new no commit is made.

    Raises:
        TrainerError: `refusal`; the file is another run's, of a synthetic teacher, or not the one that the card tells
            of; or what the hub refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    if reason := refusal(settings):
        raise TrainerError(reason)
    repository, files = str(settings.publish.repository), [Path(file) for file in settings.exports]
    files += [Path(settings.companion)] if settings.companion else []
    _check(settings, files, card)
    disable_progress_bars()
    logging.set_verbosity_error()  # its warnings hold signed addresses
    api = HfApi(token=os.environ["HF_TOKEN"])
    uploads = {"README.md": card} | {file.name: file for file in files}
    with _explained(repository):
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.create_commit(
            repository,
            [CommitOperationAdd(name, file) for name, file in uploads.items()],
            commit_message=f"Upload {files[0].name}",
        )
    return str(commit.commit_url)


def _check(settings: Settings, files: list[Path], card: Path) -> None:
    from trainer import export
    from trainer.lora import files as lora_files

    is_lora = isinstance(packs.get(settings.pack), LoraPack)
    for file in files:
        if not is_lora:
            export.refuse_anothers(file, settings.run, "nothing was uploaded")
        elif file.suffix == LoraPack.suffix:
            lora_files.refuse_anothers(file, str(settings.run))
    if sha256(files[0]) not in card.read_text(encoding="utf-8"):
        raise TrainerError(f"{card} tells of another file than {files[0]}: nothing was uploaded; delete the card")
    if not is_lora and export.read_keys(files[0]).get("adapter.teacher") == "synthetic":
        raise TrainerError(f"{files[0]} was trained on a synthetic teacher, and is of no use: nothing was uploaded")


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into one sentence."""
    from huggingface_hub import constants

    from trainer.hub import status_of

    try:
        yield
    except Exception as error:
        where, status = f"{repository} at {constants.ENDPOINT}", status_of(error)
        if constants.HF_HUB_OFFLINE:
            reason = f"{where} was not asked: HF_HUB_OFFLINE is set"
        elif status == 401:
            reason = f"{where} was not changed: the hub does not know the token in HF_TOKEN"
        elif status in (403, 404):
            reason = f"{where} was not changed: the token in HF_TOKEN may not write to it (status {status})"
        elif isinstance(error, ValueError):
            reason = f"{where} was not changed: {' '.join(str(error).split())}"
        else:
            said = f"status {status}" if status else type(error).__name__
            reason = f"{where} was not changed ({said}); run the same command again: what has arrived is not sent twice"
        raise TrainerError(reason) from error
