"""The Hugging Face hub: what a repository holds, its cache on this machine, and downloads that resume.

The hub's own client starts a file anew when its process was stopped (huggingface_hub issue 4196). Large files are
therefore fetched here, into the same cache under the same lock, and the client adds the rest and the links.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal

from trainer.completeness import alternatives, is_commit, matching
from trainer.errors import TrainerError
from trainer.files import disk_full, is_disk_full, sha256, written_whole
from trainer.job import Progress, log
from trainer.packs.base import Material

WORKERS = 4


class Digests:
    """SHA-256 of files, each read once while its size and modification time stay."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}

    def remember(self, path: Path, size: int, mtime_ns: int, digest: str) -> None:
        """Take a digest from an earlier time."""
        self._known[os.path.realpath(path), size, mtime_ns] = digest

    def sha256(self, path: Path) -> str:
        """The file's SHA-256, in hex."""
        stat = path.stat()
        key = (os.path.realpath(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            self._known[key] = sha256(path)
        return self._known[key]


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit. files: by name, the size and, for large files, the sha256.

    license: as its card says.
    """

    repository: str
    commit: str
    files: dict[str, tuple[int, str | None]]
    license: str | None = None

    def difference(self, name: str, size: int, digest: str | None = None) -> str | None:
        """How a file on disk differs from the hub's, in words; None if it does not."""
        if name not in self.files:
            return f"{name} is not in {self.repository} at {self.commit[:8]}"
        hub_size, hub_digest = self.files[name]
        if size != hub_size:
            return f"{name} has {size} bytes, on the hub {hub_size}"
        if digest and hub_digest and digest != hub_digest:
            return f"{name} has another sha256 than on the hub"
        return None


def offline() -> bool:
    """Whether the user forbade the network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _token() -> str | Literal[False]:
    return os.environ.get("HF_TOKEN") or False


def listing(material: Material, revision: str) -> Listing:
    """What the hub has of a material's repository.

    Raises:
        TrainerError: why that cannot be known.
    """
    from huggingface_hub import HfApi

    if offline():
        raise TrainerError("HF_HUB_OFFLINE is set")
    with _explained(material, revision):
        info = HfApi(token=_token()).repo_info(
            _repository(material), revision=revision, repo_type=_type(material), files_metadata=True, timeout=20
        )
        files = {file.rfilename: (file.size or 0, file.lfs and file.lfs.sha256) for file in info.siblings or []}
        return Listing(_repository(material), str(info.sha), files, _license(info.card_data))


def _license(card: Any) -> str | None:
    """The licence that the card of a repository names; a data set's may name several."""
    named = card and (card.get("license_name") or card.get("license"))
    return ", ".join(map(str, named)) if isinstance(named, list) else named and str(named)


def reach(material: Material, revision: str) -> None:
    """Ask the hub whether it would let a material be downloaded; nothing is.

    Raises:
        TrainerError: why not.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = f"{constants.ENDPOINT}/api/{_type(material)}s/{_repository(material)}/revision/{revision}"
    with _explained(material, revision):
        hf_raise_for_status(get_session().head(url, headers=build_hf_headers(token=_token()), timeout=5))


def cached(material: Material, revision: str) -> list[Path]:
    """Snapshots in the hub's cache on this machine: of that commit or branch, or all if the branch is not known."""
    folder = _cache(material)
    if is_commit(revision):
        return [path for path in [folder / "snapshots" / revision] if path.is_dir()]
    branch = folder / "refs" / revision
    if branch.is_file():
        return cached(material, branch.read_text(encoding="utf-8").strip())
    return sorted(path for path in folder.glob("snapshots/*") if path.is_dir())


def download(material: Material, hub: Listing, digests: Digests) -> Path:
    """Fetch a snapshot into the hub's cache, four files at a time, and return its folder.

    What was received before, by a process that was stopped, is kept; what is damaged is fetched again. A large file
    enters the cache only with the sha256 that the hub lists.

    Raises:
        TrainerError: access, network, disk, or a file that came damaged.
    """
    from huggingface_hub import constants, hf_hub_url, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    absent = [pattern for pattern in material.patterns if not matching(list(hub.files), (pattern,))]
    if absent:
        raise TrainerError(f"{hub.repository} at {hub.commit} has no {', '.join(absent)}; set another revision")
    disable_progress_bars()
    logging.set_verbosity_error()  # its warnings hold signed addresses
    names = matching(sorted(hub.files), material.patterns + material.optional)
    folder = _cache(material)
    blobs, snapshot = folder / "blobs", folder / "snapshots" / hub.commit
    blobs.mkdir(parents=True, exist_ok=True)
    _drop_damaged(snapshot, names, hub, digests)

    large = {digest: name for name in names if (digest := hub.files[name][1])}
    sizes = {digest: hub.files[name][0] for digest, name in large.items()}
    todo = {digest: size for digest, size in sizes.items() if not (blobs / digest).exists()}
    left = sum(size - _received(blobs / digest) for digest, size in todo.items())
    free = shutil.disk_usage(blobs).free
    if left > free:
        raise TrainerError(
            f"{material.title} needs {left / 1e9:.2f} GB more, but the disk that holds {constants.HF_HUB_CACHE} has "
            f"only {free / 1e9:.2f} GB free; free some space or set HF_HOME to a folder on another disk"
        )
    log.info("%s: downloading %s at %s, %.2f GB to go", material.id, hub.repository, hub.commit, left / 1e9)
    progress, guard, stop = Progress(f"download {material.id}", max(-(-left // 10**6), 1), "MB"), Lock(), Event()

    def received(count: int) -> None:
        if stop.is_set():
            raise InterruptedError("another file failed, or the user stopped")
        with guard:
            progress.update(count / 1e6)

    def fetch(digest: str) -> None:
        url = hf_hub_url(hub.repository, large[digest], repo_type=_type(material), revision=hub.commit)
        with _locked(folder, digest):
            _fetch(url, blobs / digest, sizes[digest], received, digests)

    with _explained(material, hub.commit), ThreadPoolExecutor(WORKERS) as pool:
        try:
            list(pool.map(fetch, large))
        except BaseException:
            stop.set()
            raise
        snapshot_download(
            hub.repository,
            repo_type=_type(material),
            revision=hub.commit,
            allow_patterns=names,
            token=_token(),
            max_workers=WORKERS,
        )
    return snapshot


def _drop_damaged(snapshot: Path, names: list[str], hub: Listing, digests: Digests) -> None:
    for name in names:
        path = snapshot / name
        if path.is_file() and (problem := hub.difference(name, path.stat().st_size, digests.sha256(path))):
            log.info("removed a damaged file from the hub's cache: %s", problem)
            path.resolve().unlink()
            path.unlink(missing_ok=True)


def _received(blob: Path) -> int:
    partial = _partial(blob)
    return partial.stat().st_size if partial.exists() else 0


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


class _Sink(io.BufferedWriter):
    """A file that is written on from its end and reports what it receives."""

    def __init__(self, path: Path, received: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._received = received

    def write(self, data: Any) -> int:
        self._received(len(data))
        return super().write(data)


def _fetch(url: str, blob: Path, size: int, received: Callable[[int], None], digests: Digests) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if blob.exists():
        if digests.sha256(blob) == blob.name:
            return
        log.info("removed a damaged file from the hub's cache: %s", blob)
        blob.unlink()
    partial = _partial(blob)
    if _received(blob) > size:
        partial.unlink()
    with _Sink(partial, received) as sink:
        headers = build_hf_headers(token=_token()) | {"Accept-Encoding": "identity"}
        http_get(url, sink, resume_size=sink.tell(), headers=headers, expected_size=size, displayed_filename="")
        sink.flush()
        os.fsync(sink.fileno())
    if digests.sha256(partial) != blob.name:
        partial.unlink()
        raise TrainerError(
            f"{url} came damaged (its sha256 is not the hub's) and was removed; run the same command again"
        )
    os.replace(partial, blob)


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """The lock that the hub's client also takes for this blob."""
    from filelock import FileLock, Timeout

    path = folder.parent / ".locks" / folder.name / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, mode=0o664)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("another process is downloading the same file; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_prompts(material: Material, revision: str, path: Path) -> None:
    """Download the prompts of a data set and write them as one parquet file with the single column `prompt`.

    Raises:
        TrainerError: access, network, or a data set that is not as expected.
    """
    import datasets
    import pyarrow as pa
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars
    from pyarrow import parquet

    disable_progress_bars()
    datasets.disable_progress_bars()
    repository, column = _repository(material), material.pattern
    log.info("%s: reading %s at %s, about %.2f GB", material.id, repository, revision, material.gigabytes)
    with _explained(material, revision):
        if material.patterns:
            file = hf_hub_download(
                repository, material.patterns[0], repo_type="dataset", revision=revision, token=_token()
            )
            batches = _column(file, column)
        else:
            rows = datasets.load_dataset(repository, split="train", revision=revision, token=_token())
            if column not in rows.column_names:
                raise TrainerError(f"{repository} at {revision} has no column {column}; set another revision")
            batches = rows.select_columns([column]).with_format("arrow").iter(10_000)
    schema = pa.schema([("prompt", pa.string())], metadata={"repository": repository, "revision": revision})
    with written_whole(path) as aside, parquet.ParquetWriter(aside, schema) as writer:
        for batch in batches:
            values = batch.column(column).cast(pa.string()).drop_null()
            writer.write_table(pa.table({"prompt": values}, schema=schema))


def _column(file: str, column: str) -> Iterator[Any]:
    """Record batches of one column of a parquet or CSV file."""
    from pyarrow import csv, parquet

    if file.endswith(".parquet"):
        return parquet.ParquetFile(file).iter_batches(columns=[column])
    options = csv.ConvertOptions(include_columns=[column], column_types={column: "string"})
    quoted = csv.ParseOptions(newlines_in_values=True)
    return iter(csv.open_csv(file, parse_options=quoted, convert_options=options))


def how_to_get(material: Material, revision: str) -> str:
    """How to get a material by hand, where there is a network."""
    dataset = " --repo-type dataset" if _type(material) == "dataset" else ""
    wanted = "".join(f' --include "{pattern}"' for pattern in alternatives(material.patterns + material.optional))
    return (
        f"run `hf download {material.repository}{dataset} --revision {revision}{wanted}` where there is a network, "
        f"or set materials.paths.{material.id}"
    )


def _repository(material: Material) -> str:
    assert material.repository, f"{material.id} has no repository"
    return material.repository


def _type(material: Material) -> str:
    return "dataset" if material.role in ("prompts", "images") else "model"


def cache_folder() -> Path:
    """Where the hub's client keeps what it downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _cache(material: Material) -> Path:
    return cache_folder() / f"{_type(material)}s--{_repository(material).replace('/', '--')}"


def _causes(error: Exception) -> list[BaseException]:
    """An error of the hub's client: some come wrapped, with the telling one as their cause."""
    return [error, *filter(None, [error.__cause__])]


def status_of(error: Exception) -> int | None:
    """The status that the hub answered with; None where it did not answer."""
    statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in _causes(error))
    return next(filter(None, statuses), None)


@contextlib.contextmanager
def _explained(material: Material, revision: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into one sentence; its own texts run over many lines."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        status, causes = status_of(error), _causes(error)

        def is_a(kind: type[Exception]) -> bool:
            return any(isinstance(cause, kind) for cause in causes)

        where = f"{material.repository} at {constants.ENDPOINT}"
        if is_disk_full(error):
            raise disk_full(_cache(material) / "blobs" / material.id) from error
        if is_a(GatedRepoError):
            reason = f"{where} is gated: accept its terms on its page and set HF_TOKEN to a token of your account"
        elif is_a(RevisionNotFoundError):
            reason = f"{where} has no revision {revision}; set materials.revisions.{material.id} to one it has"
        elif is_a(RepositoryNotFoundError) or status in (401, 403):
            token = "the token in HF_TOKEN has no access" if _token() else "it needs a token in HF_TOKEN"
            reason = f"{where} does not exist, or {token} (status {status})"
        elif status:
            reason = f"{where} answered with status {status}; try again later"
        else:
            reason = (
                f"{where} could not be read ({type(error).__name__}); check the network and run the same command again"
            )
        raise TrainerError(reason) from error
