"""Files that appear whole: written aside, synced, renamed; and the digests that identify them."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError


def disk_full(path: Path | str) -> TrainerError:
    """The error for a write that met a full disk."""
    folder = Path(path).parent
    free = shutil.disk_usage(folder).free / 1e9
    return TrainerError(
        f"the disk that holds {folder} is full ({free:.2f} GB free): {Path(path).name} was not written and nothing "
        "written before is lost; free some space and run the same command again"
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of Python's, or one of the safetensors library (which carries only text), means a full disk."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)


_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def written_whole(path: Path | str) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; on success sync it and rename it over `path`.

    On any error the temporary file is removed and `path` is as it was. The temporary name is fixed, so that what a
    killed process left behind is overwritten by the next one instead of piling up.

    Raises:
        TrainerError: the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    try:
        yield aside
        with open(aside, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_UMASK)  # some writers make files that only their owner can read
        os.replace(aside, path)
        _sync_folder(path.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 text with LF line ends, whole."""
    with written_whole(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


def to_json(value: Any) -> str:
    """JSON for people and for comparison: sorted keys, two spaces, a final newline. NaN and infinity are refused."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as JSON, whole."""
    write_text(path, to_json(value))


def read_json(path: Path | str) -> Any:
    """Read a JSON file of ours.

    Raises:
        TrainerError: it is missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainerError(f"{path} is missing; run the stage that writes it") from None
    except ValueError as error:
        raise TrainerError(f"{path} is not valid JSON ({error}); delete it and run the stage that writes it") from None


def write_if_changed(path: Path | str, value: Any) -> bool:
    """Write JSON only if that changes the file, so that its time says when its content last changed."""
    path = Path(path)
    text = to_json(value)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


def digest(value: Any) -> str:
    """The identity of a JSON-able value: 16 hex digits of the SHA-256 of its canonical form."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def sha256(path: Path | str) -> str:
    """The SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
