"""Which caption belongs to which picture of a folder.

In this order: the file of the picture's stem that ends in .txt, then .caption; a line of metadata.jsonl, then of
captions.jsonl; the instance prompt. An empty caption file says that the lines do not count, the instance prompt may.
Nothing is passed over in silence: what is not used has a row, what is ambiguous or cannot be read is a fault.
"""

import json
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainer import picture_sources
from trainer.picture_sources import SUFFIXES, shown

MASK = "-mask.png"
_SIDECARS = (".txt", ".caption")
_TABLES = ("metadata.jsonl", "captions.jsonl")
_FILE_KEYS = ("file_name", "image", "file")
_OTHER_PICTURES = (".heic", ".heif", ".avif", ".tif", ".tiff", ".gif", ".jfif", ".jxl")
_READ = (*SUFFIXES, *_OTHER_PICTURES, *_SIDECARS, ".jsonl")
_SHOWN = 60  # characters of a caption in a message


class Captioned(NamedTuple):
    """A picture's file in the folder, its caption (None: it has none), where that is from, and the mask's file."""

    file: str
    text: str | None
    origin: str = ""
    mask: str | None = None


@dataclass
class Captions:
    """What a folder holds.

    pictures: in the order of their names.
    unreadable: {"file", "reason"} of pictures in formats that are not read.
    skipped: {"file", "reason"} of everything else that is not used.
    disagreements: {"file", "taken", "passed_over"}: where else another caption of the picture was found.
    faults: what has to be put right, one sentence each.
    """

    pictures: list[Captioned] = field(default_factory=list)
    unreadable: list[dict[str, str]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    disagreements: list[dict[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def skip(self, file: str, reason: str) -> None:
        """Add a row to `skipped`."""
        self.skipped.append({"file": shown(file), "reason": reason})


class _Line(NamedTuple):
    """A line of a table: where it is, the file it names, its caption."""

    where: str
    file: str
    text: str


def folder_digest(path: str, setting: str) -> str:
    """A digest of the names, sizes and times of all files of a folder that `discover` looks at.

    Raises:
        TrainerError: there is no such folder, or it cannot be read.
    """
    return picture_sources.folder_digest(path, _READ, setting)


def discover(
    path: str, setting: str, column: str = "text", instance_prompt: str | None = None, masks: bool = False
) -> Captions:
    """The pictures directly in a folder, and their captions; no picture is opened.

    Args:
        path: the folder.
        setting: the one that names it, for messages.
        column: key of the caption in the lines of tables.
        instance_prompt: caption of pictures that have no other.
        masks: whether `<stem>-mask.png` beside a picture is its mask.

    Raises:
        TrainerError: there is no such folder, or it cannot be read.
    """
    found = Captions()
    direct, below = [], defaultdict(list)
    for name, _ in picture_sources.listing(path, _READ, setting):
        folder, slash, _ = name.partition("/")
        if not slash:
            direct.append(name)
        elif name.lower().endswith((*SUFFIXES, *_OTHER_PICTURES)):
            below[folder].append(name)
    for folder, names in below.items():
        found.skip(folder, f"a folder with {len(names)} pictures: only those directly in {path} are taken")
    others = [name for name in direct if name.lower().endswith(_OTHER_PICTURES)]
    for name in others:
        kind = Path(name).suffix[1:].upper()
        found.unreadable.append({"file": shown(name), "reason": f"{kind} is not read: convert it to PNG or JPEG"})
    files, of_picture = _without_masks([name for name in direct if name.lower().endswith(SUFFIXES)], masks, found)
    of_stem = {_stem(name): name for name in [*others, *files]}
    _check_stems(files, found)
    sidecars = _sidecars(path, direct, of_stem, found)
    tables = _tables(path, direct, [*others, *files], column, found)
    for file in files:
        text, origin = _caption(file, sidecars.get(_stem(file), {}), tables, instance_prompt, found)
        found.pictures.append(Captioned(file, text, origin, of_picture.get(file)))
    return found


def _without_masks(names: list[str], wanted: bool, found: Captions) -> tuple[list[str], dict[str, str]]:
    """The names of pictures, and the names of their masks by theirs."""
    by_stem = {_stem(name): name for name in names}
    files, masks = [], {}
    for name in names:
        is_mask = name.lower().endswith(MASK)
        picture = by_stem.get(_normal(name[: -len(MASK)])) if is_mask else None
        if picture and wanted:
            masks[picture] = name
        elif picture:
            found.skip(name, f"the mask of {shown(picture)}, and pictures.masks is off")
        elif wanted and is_mask:
            found.faults.append(f"{shown(name)} is the mask of no picture; rename it if it is a picture itself")
        else:
            files.append(name)
    return files, masks


def _check_stems(files: list[str], found: Captions) -> None:
    alike = defaultdict(list)
    for file in files:
        alike[_stem(file).lower()].append(file)
    for names in alike.values():
        if len(names) > 1:
            same = len(set(map(_stem, names))) < len(names)
            how = "have one stem, so that captions could be of either" if same else "differ by case only"
            found.faults.append(f"{', '.join(map(shown, names))} {how}; rename all but one")


def _sidecars(
    path: str, direct: list[str], of_stem: dict[str, str], found: Captions
) -> dict[str, dict[str, str | None]]:
    """Texts of caption files: by stem, {name: text} in the order in which they count; None for one that is a fault."""
    by_case = {stem.lower(): name for stem, name in of_stem.items()}
    texts: dict[str, dict[str, str | None]] = defaultdict(dict)
    names = [name for name in direct if name.lower().endswith(_SIDECARS)]
    for name in sorted(names, key=lambda name: (_SIDECARS.index(Path(name).suffix.lower()), name)):
        stem = _stem(name)
        if stem in of_stem:
            texts[stem][name] = _read(path, name, found)
        elif near := by_case.get(stem.lower()):
            found.faults.append(f"{shown(name)} and the picture {shown(near)} differ by case; rename one of them")
        else:
            found.skip(name, "the caption of no picture")
    return texts


def _tables(path: str, direct: list[str], files: list[str], column: str, found: Captions) -> dict[str, list[_Line]]:
    """Lines of tables by the picture they are of, in the order in which they count."""
    for name in direct:
        if name.lower().endswith(".jsonl") and name not in _TABLES:
            found.skip(name, f"of .jsonl files only {' and '.join(_TABLES)} are read")
    exact = {_normal(file): file for file in files}
    of_picture: dict[str, list[_Line]] = defaultdict(list)
    for table in _TABLES:
        lines = _lines(table, _read(path, table, found) or "", column, found) if table in direct else []
        named = {line.file for line in lines} & exact.keys()
        for line in lines:
            base = PurePosixPath(line.file).name
            # Another folder's picture of the same name: this line is of that one.
            file = exact.get(line.file) or (exact.get(base) if base not in named else None)
            if file is None:
                found.skip(line.where, f"names {line.file}, and there is no such picture")
                continue
            earlier = next((other for other in of_picture[file] if other.where.startswith(table)), None)
            if earlier and earlier.text != line.text:
                found.faults.append(
                    f"{line.where} and {earlier.where.rpartition(', ')[2]} give {shown(file)} different captions "
                    f"({_short(line.text)}, {_short(earlier.text)}); remove one"
                )
            of_picture[file].append(line)
    return of_picture


def _lines(table: str, text: str, column: str, found: Captions) -> list[_Line]:
    lines = []
    for number, row in enumerate(text.split("\n"), 1):
        where = f"{table}, line {number}"
        if not row.strip():
            continue
        try:
            values = json.loads(row)
        except (ValueError, RecursionError) as error:
            found.skip(where, f"no JSON ({str(error).partition(':')[0]})")
            continue
        problem, file, caption = _fields(values, column)
        if problem:
            found.skip(where, problem)
        else:
            lines.append(_Line(where, file, caption))
    return lines


def _fields(values: Any, column: str) -> tuple[str, str, str]:
    """What is wrong with a line, or the file it names and its caption."""
    if not isinstance(values, dict):
        return "no JSON object", "", ""
    file = next((values[key] for key in _FILE_KEYS if isinstance(values.get(key), str)), None)
    if not file:
        return f"no file under {', '.join(_FILE_KEYS)}", "", ""
    caption = values.get(column)
    if not isinstance(caption, str) or not caption.strip():
        return f"no caption of {_writable(file)} under `{column}`", "", ""
    if _writable(file + caption) != file + caption:
        return "halves of characters, which are no text", "", ""
    return "", _normal(str(PurePosixPath(file.replace("\\", "/")))), _tidy(caption)


def _caption(
    file: str,
    sidecars: dict[str, str | None],
    lines: dict[str, list[_Line]],
    instance_prompt: str | None,
    found: Captions,
) -> tuple[str | None, str]:
    """The caption of a picture, or None, and where it is from; others of it are listed."""
    said = [(shown(name), text) for name, text in sidecars.items() if text is not None]
    if len(said) < len(sidecars):
        return "", "sidecar"  # one of them is a fault: the picture is not told to have no caption as well
    if said and not said[0][1]:
        taken, text, origin = said[0][0], None, ""
        others = [(where, text) for where, text in said[1:] if text]
    else:
        said += [(line.where, line.text) for line in lines.get(file, [])]
        (taken, text), *others = said or [("", None)]
        origin = "sidecar" if sidecars else taken.partition(",")[0]
    if text is None and instance_prompt:
        text, origin = _tidy(instance_prompt), "instance prompt"
    found.disagreements += [
        {"file": shown(file), "taken": taken, "passed_over": where} for where, other in others if other != text
    ]
    return text, origin


def _read(path: str, name: str, found: Captions) -> str | None:
    """A file's text, tidied, or None: what is wrong with it is a fault."""
    try:
        data = Path(path, name).read_bytes()
    except OSError as error:
        found.faults.append(f"{shown(name)} cannot be read ({error.strerror}); make it readable")
        return None
    offset = data.find(0)  # UTF-8 allows it, and no caption has it: this is another encoding
    try:
        if offset < 0:
            return _tidy(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        # With a mark of its own that is left out, the decoder counts from behind it.
        offset = error.start + len(data) - len(error.object)
    start = data.rfind(b"\n", 0, offset) + 1
    encoding = "utf-16" if b"\0" in data else "cp1252"
    guess = (data if encoding == "utf-16" else data[start:].partition(b"\n")[0]).decode(encoding, "replace")
    number = data.count(b"\n", 0, offset) + 1
    line = f", line {number}" if name in _TABLES else ""
    found.faults.append(
        f"{shown(name)}{line} is not UTF-8: byte {offset} is 0x{data[offset]:02x} (as {encoding} it says "
        f"{_short(_tidy(guess))}); save it as UTF-8"
    )
    return None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return f'"{text}"' if len(text) <= _SHOWN else f'"{text[:_SHOWN]}..."'


def _writable(text: str) -> str:
    """A text without halves of characters, which JSON can spell and nothing can write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _tidy(text: str) -> str:
    """A caption without what editors add to it: the ends of lines of other systems, and space at both ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _stem(name: str) -> str:
    return _normal(Path(name).stem)


def _normal(name: str) -> str:
    """A name in the form in which names are compared: file systems and tables compose accents or do not."""
    return unicodedata.normalize("NFC", name)
