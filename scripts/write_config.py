"""Write config.yaml and config.schema.json from the settings in trainer/config.py: `python scripts/write_config.py`."""

import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from trainer.config import Settings
from trainer.files import write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
HEADER = """\
Every setting with its default. Leave this file as it is: put what you want otherwise into a file of your own
(a pack's pack.yaml is one), which needs only the keys that differ. Later files win: config.yaml, then
packs/<pack>/pack.yaml, then your own --configfile, then --config on the command line.

A setting marked * may change at any time: nothing that was computed depends on it. When another one changes,
its stage and those below are redone, and no others. What is [adapters], [LoRAs] or, of adapters, [pictures] is for
packs of that kind alone; others refuse it.

Written by scripts/write_config.py from scripts/trainer/config.py."""


def default_values(model: type[BaseModel] = Settings) -> dict[str, Any]:
    """The defaults as nested plain values, before a pack fills in what is null."""
    return {
        name: default_values(field.annotation) if _is_group(field) else field.default
        for name, field in model.model_fields.items()
    }


def config_yaml() -> str:
    """config.yaml: each setting under a comment that says what it does."""
    lines = ["# yaml-language-server: $schema=config.schema.json", *_comment(HEADER, 0)]
    for name, field in Settings.model_fields.items():
        lines.append("")
        if _is_group(field):
            group = field.annotation
            lines += [*_comment(_marked(group.__doc__ or "", group.of), 0), f"{name}:"]
            for key, inner in field.annotation.model_fields.items():
                lines += _setting(key, inner, 2)
        else:
            lines += _setting(name, field, 0)
    return "\n".join(lines) + "\n"


def config_schema() -> dict[str, Any]:
    """config.schema.json: what editors check and complete settings with."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def _is_group(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _setting(name: str, field: FieldInfo, indent: int) -> list[str]:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    text = _marked(field.description or "", extra.get("of"), live=bool(extra.get("live")))
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if not all(choice in text for choice in choices):
        text += f" ({', '.join(choices)})"
    value = yaml.safe_dump(field.default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return [*_comment(text, indent), f"{' ' * indent}{name}: {value}"]


def _marked(text: str, of: str | None, live: bool = False) -> str:
    return f"{'* ' if live else ''}{f'[{of}] ' if of else ''}{text}"


def _comment(text: str, indent: int) -> list[str]:
    prefix = " " * indent + "# "
    lines = []
    for paragraph in text.strip().split("\n\n"):
        wrapped = textwrap.wrap(
            " ".join(paragraph.split()), WIDTH - len(prefix), break_long_words=False, break_on_hyphens=False
        )
        lines += [*(prefix + line for line in wrapped), prefix.rstrip()]
    return lines[:-1]


if __name__ == "__main__":
    write_text(ROOT / "config.yaml", config_yaml())
    write_json(ROOT / "config.schema.json", config_schema())
