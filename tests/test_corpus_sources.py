import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainer.errors import TrainerError
from trainer.prompt_sources import read

PROMPTS = ["a red fox", 'a "quoted", comma', "日本の庭園", "two\nlines"]


def texts(path):
    return [row.text for row in read(path)]


def problems(path):
    return [(row.line, row.problem) for row in read(path) if row.text is None]


def write_csv(path, header, rows):
    import csv

    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_txt_is_one_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red fox\r\n日本の庭園\n\nlast".encode())
    assert texts(path) == ["a red fox", "日本の庭園", "", "last"]


@pytest.mark.parametrize("column", ["prompt", "Text", "CAPTION"])
def test_tables_are_read_by_their_prompt_column(tmp_path, column):
    rows = [{"id": number, column: text} for number, text in enumerate(PROMPTS)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    write_csv(tmp_path / "p.csv", ["id", column], [row.values() for row in rows])
    pq.write_table(pa.table({"id": [0, 1, 2, 3], column: PROMPTS}), tmp_path / "p.PARQUET")
    for name in ("p.jsonl", "p.csv", "p.PARQUET"):
        assert texts(tmp_path / name) == PROMPTS


def test_prompt_goes_before_text_and_text_before_caption(tmp_path):
    write_csv(tmp_path / "p.csv", ["caption", "text", "prompt"], [["c", "t", "p"]])
    assert texts(tmp_path / "p.csv") == ["p"]
    write_csv(tmp_path / "p.csv", ["caption", "text"], [["c", "t"]])
    assert texts(tmp_path / "p.csv") == ["t"]


def test_a_table_without_prompt_column_is_an_error_that_lists_its_columns(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "words": "x"}\n')
    write_csv(tmp_path / "p.csv", ["id", "words"], [[1, "x"]])
    pq.write_table(pa.table({"id": [1], "words": ["x"]}), tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.csv", "p.parquet"):
        with pytest.raises(TrainerError, match=r"found: `id`, `words`"):
            texts(tmp_path / name)


def test_bad_lines_of_jsonl_are_told_one_by_one(tmp_path):
    lines = [b'{"text": "good"}', b"{bad", b'["text"]', b'{"text": 7}', b'{"other": "x"}', b'{"text": "\xff"}']
    lines += [b'{"text": "\\ud800"}', b"", b'{"text": null}', b"[" * 100_000, b'{"text": "end"}']
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines))
    assert [text for text in texts(tmp_path / "p.jsonl") if text] == ["good", "end"]
    assert problems(tmp_path / "p.jsonl") == [
        (2, "not valid JSON"),
        (3, "not a JSON object"),
        (4, "not text but int"),
        (5, "no `text`"),
        (6, "not valid UTF-8"),
        (7, "not valid UTF-8"),
        (9, "not text but NoneType"),
        (10, "not valid JSON"),
    ]


def test_bad_lines_of_csv_are_told_one_by_one(tmp_path):
    (tmp_path / "p.csv").write_bytes(b'n,text\n1,good\n2\n3,\xff\n4,"two\nlines"\n5,end\n')
    assert [text for text in texts(tmp_path / "p.csv") if text] == ["good", "two\nlines", "end"]
    assert problems(tmp_path / "p.csv") == [(3, "no column 2"), (4, "not valid UTF-8")]


def test_every_line_that_an_open_quote_swallows_counts(tmp_path):
    (tmp_path / "p.csv").write_text('text\ngood\n"open\nlost\nlost\n')
    assert [line for line, _ in problems(tmp_path / "p.csv")] == [3, 4, 5]


def test_bad_values_of_parquet_are_told_one_by_one(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xff\xfeb")]
    )
    pq.write_table(pa.table({"text": broken}), tmp_path / "p.parquet")
    assert texts(tmp_path / "p.parquet") == ["a", None, "b"]
    pq.write_table(pa.table({"text": ["x", None, "y"]}), tmp_path / "p.parquet")
    assert problems(tmp_path / "p.parquet") == [(2, "not text but NoneType")]
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "p.parquet")
    assert problems(tmp_path / "p.parquet") == [(1, "not text but int"), (2, "not text but int")]


def test_parquet_rows_are_numbered_through_and_dictionaries_are_text(tmp_path):
    column = pa.array(["x", None, "y", "x"] * 3).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "p.parquet", row_group_size=5)
    assert [line for line, _ in problems(tmp_path / "p.parquet")] == [2, 6, 10]
    assert texts(tmp_path / "p.parquet").count("x") == 6


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.docx", b"x", "of no known kind: prompts come from .txt, .jsonl, .csv, .parquet files"),
        ("p.txt", b"", "holds no prompts"),
        ("p.jsonl", b"\n\n", "holds no prompts"),
        ("p.csv", b"", "holds no prompts"),
        ("p.csv", b"text\n", "holds no prompts"),
        ("p.csv", b'"text', "does not begin with a line of column names"),
        ("p.parquet", b"PAR1 damaged", "cannot be read as parquet"),
        ("p.parquet", b"", "cannot be read as parquet"),
    ],
)
def test_a_file_that_is_bad_as_a_whole_is_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainerError) as caught:
        texts(tmp_path / name)
    assert said in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(TrainerError, match=r"missing\.txt does not exist"):
        texts(tmp_path / "missing.txt")
