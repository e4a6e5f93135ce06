"""The tables of README.md have every row, and every test that they name is there."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROWS = [
    re.split(r"(?<!\\) \| ", line.strip("| \n"))
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [UD]?\d+ \|", line)
]


def defined_in(file):
    place = FOLDER / file if (FOLDER / file).exists() else FOLDER.parent / file
    tree = ast.parse(place.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_behaviour_and_every_bug_has_its_row():
    expected = [*(f"U{n}" for n in range(1, 45)), *(f"D{n}" for n in range(1, 25)), *map(str, range(1, 25))]
    assert [number for number, *_ in ROWS] == expected
    assert {len(row) for row in ROWS} == {3}


@pytest.mark.parametrize(("number", "words", "held"), ROWS, ids=[number for number, *_ in ROWS])
def test_what_a_row_names_is_there(number, words, held):
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", held)
    assert named, "a test, or a reason with one that holds what there is instead"
    assert not [name for file, name in named if name not in defined_in(file)]
    assert words
