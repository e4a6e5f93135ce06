"""The pictures of the workflow in docs/ show the workflow as it is."""

import html
import re
import xml.etree.ElementTree as ET

import pytest
from workflow import CHECKOUT, Project

SVG = "{http://www.w3.org/2000/svg}"


def words(text):
    return "".join(text.split())


def of_snakemake(tmp_path, kind):
    """Nodes, as all that stands in them, and edges between them, of the graph that Snakemake gives now."""
    made = Project(tmp_path, {"pack": "demo", "run": "demo"}, pack="demo")
    output = made.snakemake(f"--{kind}", "--configfile", str(CHECKOUT / "packs" / "demo" / "pack.yaml"))
    graph = output[output.index("digraph") :].replace(r"\\", "\\")
    nodes = dict(
        re.findall(r"^\s*(\d+) ?\[.*?label ?= ?<?(<table.*?</table>|\"[^\"]*\")", graph, re.MULTILINE | re.DOTALL)
    )
    nodes = {id: words(html.unescape(re.sub(r"<[^>]*>", "", label.strip('"')))) for id, label in nodes.items()}
    return {(nodes[one], nodes[other]) for one, other in re.findall(r"(\d+) -> (\d+)", graph)}


def of_picture(path):
    nodes, edges = {}, []
    for group in ET.parse(path).iter(f"{SVG}g"):
        title = group.findtext(f"{SVG}title", "")
        if group.get("class") == "node":
            nodes[title] = "".join(words("".join(text.itertext())) for text in group.iter(f"{SVG}text"))
        elif group.get("class") == "edge":
            edges.append(title.split("->"))
    return {(nodes[one], nodes[other]) for one, other in edges}


@pytest.mark.parametrize("kind", ["rulegraph", "filegraph"])
def test_a_picture_shows_the_rules_and_files_that_there_are(tmp_path, kind):
    command = f"snakemake --profile packs/demo --{kind} | dot -Tsvg > docs/{kind}.svg"
    assert command in (CHECKOUT / "README.md").read_text(encoding="utf-8")
    now = of_snakemake(tmp_path, kind)
    assert len(now) > 10
    assert of_picture(CHECKOUT / "docs" / f"{kind}.svg") == now, f"give the command {command}"
