"""Prompts from files: .txt (one a line), .jsonl, .csv and .parquet (a column `prompt`, `text` or `caption`)."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import TrainerError

COLUMNS = ("prompt", "text", "caption")


class Row(NamedTuple):
    """One prompt, or why there is none: `text` is None exactly if there is a `problem`. Lines count from 1."""

    line: int
    text: str | None
    problem: str = ""


def read(path: Path | str) -> Iterator[Row]:
    """The prompts of a file, in order, as they are written there.

    Raises:
        TrainerError: the file is missing, empty, of an unknown kind, damaged as a whole or without a prompt column.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise TrainerError(f"{path} is of no known kind: prompts come from {', '.join(_READERS)} files")
    if not path.is_file():
        raise TrainerError(f"the prompt file {path} does not exist; correct its path in the settings of `corpus`")
    empty = True
    for row in reader(path):
        empty = False
        yield _checked(row)
    if empty:
        raise TrainerError(
            f"the prompt file {path} holds no prompts; fill it or take it out of the settings of `corpus`"
        )


def _checked(row: Row) -> Row:
    """Bytes that are not UTF-8 were read as lone surrogates, which JSON can spell too; neither can be encoded."""
    if row.text is None or row.text.isascii():
        return row
    try:
        row.text.encode()
    except UnicodeEncodeError:
        return Row(row.line, None, "not valid UTF-8")
    return row


def _value(line: int, value: Any) -> Row:
    return Row(line, value) if isinstance(value, str) else Row(line, None, f"not text but {type(value).__name__}")


def _column(path: Path, names: Iterable[str]) -> str:
    """The name of the prompt column as the file spells it."""
    names = list(names)
    for column in COLUMNS:
        for name in names:
            if name.strip().lower() == column:
                return name
    found = ", ".join(f"`{name}`" for name in names) or "none"
    raise TrainerError(f"{path} has no column `prompt`, `text` or `caption` (found: {found}); rename its prompt column")


def _txt(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, 1):
            yield Row(line, text.removesuffix("\n"))


def _jsonl(path: Path) -> Iterator[Row]:
    column = None
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                yield Row(line, None, "not valid JSON")
                continue
            if not isinstance(value, dict):
                yield Row(line, None, "not a JSON object")
                continue
            column = column or _column(path, value)
            yield _value(line, value[column]) if column in value else Row(line, None, f"no `{column}`")


def _csv(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, None)
        except csv.Error as error:
            raise TrainerError(f"{path} does not begin with a line of column names ({error}); repair it") from None
        if header is None:
            return
        index = header.index(_column(path, header))
        while True:
            first = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                # An unclosed quote swallows lines: each of them is a prompt that is lost.
                for line in range(first, max(rows.line_num, first) + 1):
                    yield Row(line, None, f"not valid CSV ({error})")
                continue
            if row:
                yield Row(first, row[index]) if index < len(row) else Row(first, None, f"no column {index + 1}")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            # Only columns at the top: a struct has a name of its own.
            column = _column(path, file.schema_arrow.names)
            read = 0
            for batch in file.iter_batches(columns=[column]):
                values = batch.column(column)
                if pa.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                    # As bytes: Arrow does not check UTF-8, and one bad value must not take its whole batch along.
                    coded = values.cast(pa.large_binary()).to_pylist()
                    listed = [value if value is None else value.decode("utf-8", "surrogateescape") for value in coded]
                else:
                    listed = values.to_pylist()
                yield from (_value(line, value) for line, value in enumerate(listed, read + 1))
                read += len(listed)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise TrainerError(f"{path} cannot be read as parquet ({reason}); replace the file") from None


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
