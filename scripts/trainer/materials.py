"""The materials of a run: which it needs, and what is recorded of each.

Light to import: the Snakefile asks for the ids on every call. `trainer.finding` finds them.
"""

import contextlib
import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer import files, packs
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.lora import bases
from trainer.packs.base import Material, prompt_material
from trainer.packs.picture_sets import picture_material


@dataclass(frozen=True)
class Record:
    """What a run used: one runs/<run>/materials/<id>.json.

    path: absolute; a snapshot's folder, or the one file.
    found: `path`, `package`, `made`, `run`, `search`, `other run`, `cache` or `downloaded`.
    revision: commit of the repository; null where a local copy does not say and no hub confirmed it.
    files: name (relative to the folder), bytes and sha256 of each.
    digest: identity of the content, the same wherever it lies.
    """

    id: str
    kind: str
    title: str
    role: str
    path: str
    found: str
    repository: str | None
    revision: str | None
    package: str | None
    version: str | None
    files: list[dict[str, Any]]
    digest: str


def read_record(path: Path | str) -> Record:
    """Read a record.

    Raises:
        TrainerError: it is missing or not a record.
    """
    try:
        return Record(**files.read_json(path))
    except TypeError:
        raise TrainerError(
            f"{path} is not a record of a material; delete it and run the stage that writes it"
        ) from None


def parts_digest(record: Record, names: tuple[str, ...]) -> str:
    """Identity of some of a material's files: of the folders of these names, or the files at its top."""
    return files.digest(
        sorted([it["name"], it["sha256"]] for it in record.files if it["name"].partition("/")[0] in names)
    )


def license_of(settings: Settings, record: dict[str, Any]) -> str | None:
    """The licence of a material as its repository's card or its package says; None where neither was heard."""
    if record["package"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            told = importlib.metadata.metadata(record["package"])
            named = told.get("License-Expression") or told.get("License") or ""
            return named if len(named.splitlines()) == 1 else None  # some have the whole text there
    try:
        return files.read_json(Path(settings.folder) / "materials" / f"{record['id']}.lock.json").get("license")
    except TrainerError:
        return None


def recorded_files(settings: Settings, id: str) -> list[str]:
    """The files of a material that the run recorded and that are still there, so that a replaced one is noticed."""
    try:
        record = read_record(Path(settings.folder) / "materials" / f"{id}.json")
    except TrainerError:
        return []  # it is looked for in any case
    path = Path(record.path)
    root = path if path.is_dir() else path.parent
    return [str(root / file["name"]) for file in record.files if (root / file["name"]).is_file()]


def ids(settings: Settings, role: str | tuple[str, ...] | None = None) -> list[str]:
    """Ids of the materials that a run needs, of the given role or roles; without one, all that the run is made from."""
    roles = (role,) if isinstance(role, str) else role
    synthetic = settings.precompute.teacher == "synthetic"
    return [
        material.id
        for material in declared(settings)
        if (material.role in roles if roles else material.role != "companion")
        and not (synthetic and material.role == "teacher")
        and not (settings.pictures.folder and material.role == "pictures")
    ]


def get(settings: Settings, id: str) -> Material:
    """The material of that id (an unknown one is a bug: ids come from `ids`)."""
    return next(material for material in declared(settings) if material.id == id)


def declared(settings: Settings) -> list[Material]:
    """All materials of the settings' pack and presets."""
    presets = [prompt_material(preset) for preset in settings.corpus.presets if preset != "demo"]
    pictures = map(picture_material, settings.corpus.image_presets)
    own = [_chosen(settings, material) for material in packs.get(settings.pack).materials]
    return [*own, *presets, *pictures]


def _chosen(settings: Settings, material: Material) -> Material:
    """A pack's material, which for a base is another repository's where the settings name one."""
    named = settings.lora.base
    if material.role != "base" or not named or bases.is_folder(named) or named == material.repository:
        return material
    return replace(material, kind="hub", repository=named, revision="main", title=f"{named} (base)")
