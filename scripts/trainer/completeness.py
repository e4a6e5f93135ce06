"""Whether a model on disk is whole and the right one, judged without a network."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """The names that any of the patterns covers; as on the hub, `*` also covers `/`."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in alternatives(patterns))]


def alternatives(patterns: tuple[str, ...]) -> list[str]:
    """Patterns such as `a|b` taken apart."""
    return [part for pattern in patterns for part in pattern.split("|")]


def folder_files(folder: Path, patterns: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> list[str]:
    """Names, relative to `folder`, of the files that the patterns cover; without patterns all but hidden and pickled.

    `optional` patterns need not cover any.

    Raises:
        TrainerError: there is no such folder, or a pattern covers no file, or a JSON file cannot be parsed.
    """
    if not folder.is_dir():
        raise TrainerError(f"{folder} is not a folder")
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = sorted(
        path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts) and not _pickled(path)
    )
    missing = [pattern for pattern in patterns if not matching(names, (pattern,))]
    if missing:
        pickled = sorted(path.name for path in folder.iterdir() if _pickled(path))
        unused = f" ({', '.join(pickled)} is pickled, which is never read)" if pickled else ""
        raise TrainerError(f"{folder} is incomplete: it has no {', '.join(missing).replace('|', ' or ')}{unused}")
    unfinished = sorted(folder.glob(".cache/huggingface/download/**/*.incomplete"))
    if unfinished:
        raise TrainerError(f"{folder} holds an unfinished download, {unfinished[0].relative_to(folder)}")
    wanted = matching(names, patterns + optional) if patterns else names
    for name in wanted:
        if name.endswith(".json"):
            read_json(folder / name)
    return wanted


def _pickled(path: Path) -> bool:
    return path.suffix in _PICKLES


def check_weights(folder: Path, names: list[str]) -> None:
    """Check that there are safetensors, each as long as its header says, and all that their indexes name.

    Raises:
        TrainerError: which file is missing, truncated, or lacks tensors.
    """
    tensors = {name: safetensors_names(folder / name) for name in names if name.endswith(".safetensors")}
    if not tensors:
        raise TrainerError(f"{folder} has no weights in safetensors files; pickled weights are never read")
    for index in (name for name in names if name.endswith(".safetensors.index.json")):
        try:
            weight_map = dict(read_json(folder / index)["weight_map"])
        except (KeyError, TypeError, ValueError):
            raise TrainerError(f"{folder / index} has no usable weight_map") from None
        base = Path(index).parent
        for file in sorted(set(weight_map.values())):
            held = tensors.get((base / file).as_posix())
            if held is None:
                raise TrainerError(f"{folder} is incomplete: {index} names {file}, which is not there")
            lacking = sorted(name for name, where in weight_map.items() if where == file and name not in held)
            if lacking:
                raise TrainerError(
                    f"{folder / base / file} lacks {len(lacking)} tensors of {index}, such as {lacking[0]}"
                )


def safetensors_names(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file whose size is what its header implies.

    Raises:
        TrainerError: it is truncated, too long, or not such a file.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise TrainerError(f"{path} is truncated: it ends within its header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        implied = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TrainerError(f"{path} is not a safetensors file") from None
    if size != implied:
        state = "truncated" if size < implied else "damaged"
        raise TrainerError(f"{path} is {state}: it has {size} bytes, its header implies {implied}")
    return set(header)


def check_config(folder: Path, file: str, expects: dict[str, Any]) -> None:
    """Check values of a JSON file of a folder; a key such as "a.b" is of an object in it.

    Raises:
        TrainerError: the key, what was found and what is needed.
    """
    config = read_json(folder / file)
    if not isinstance(config, dict):
        raise TrainerError(f"{folder / file} is not a JSON object")
    for key, needed in expects.items():
        found = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found != needed:
            raise TrainerError(
                f"{folder} is another model than the one needed: its {file} has {key} {found!r}, not {needed!r}"
            )


def read_json(path: Path) -> Any:
    """JSON that others wrote.

    Raises:
        TrainerError: it is missing, truncated, or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path} cannot be read as JSON ({type(error).__name__})") from None


def check_prompts(path: Path) -> str | None:
    """Check a parquet file of prompts and tell the revision of the data set that it was made from, if it says so.

    Raises:
        TrainerError: it is no parquet file, has no column `prompt`, or no rows.
    """
    from pyarrow import ArrowException, parquet

    try:
        found = parquet.read_metadata(path)
        schema = parquet.read_schema(path)
    except (OSError, ArrowException) as error:
        raise TrainerError(f"{path} cannot be read as parquet ({type(error).__name__})") from None
    if "prompt" not in schema.names or not found.num_rows:
        raise TrainerError(f"{path} has no prompts: it needs a column `prompt`")
    revision = (schema.metadata or {}).get(b"revision", b"").decode()
    return revision or None


def check_pictures(folder: Path, names: list[str]) -> None:
    """Check that archives of pictures are whole, and that of files numbered like `00003-of-00038` none is missing.

    Raises:
        TrainerError: which file is missing or damaged.
    """
    import zipfile

    from pyarrow import ArrowException, parquet

    numbers: dict[str, set[int]] = {}
    for name in names:
        if part := re.search(r"(\d{5})-of-(\d{5})", name):
            numbers.setdefault(part[2], set()).add(int(part[1]))
        try:
            if name.endswith(".zip"):
                zipfile.ZipFile(folder / name).close()
            elif name.endswith(".parquet"):
                parquet.read_metadata(folder / name)
        except (OSError, zipfile.BadZipFile, ArrowException) as error:
            raise TrainerError(f"{folder / name} is truncated or damaged ({type(error).__name__})") from None
    for total, found in numbers.items():
        if missing := sorted(set(range(int(total))) - found):
            raise TrainerError(f"{folder} is incomplete: of {total} numbered files it lacks number {missing[0]}")


def known_commit(folder: Path) -> str | None:
    """The commit that a snapshot is of, where the hub's own bookkeeping beside it says so."""
    if folder.parent.name == "snapshots" and is_commit(folder.name):
        return folder.name
    for note in sorted(folder.glob(".cache/huggingface/download/*.metadata")):
        first = note.read_text(encoding="utf-8").partition("\n")[0].strip()
        if is_commit(first):
            return first
    return None


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit hash, which can never mean anything else later."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None
