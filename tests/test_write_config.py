import json
from itertools import pairwise

import write_config
import yaml
from trainer import packs
from trainer.config import Settings, load

UPDATE = "run python scripts/write_config.py and commit what it writes"


def test_committed_files_are_those_the_settings_give():
    assert (write_config.ROOT / "config.yaml").read_text(encoding="utf-8") == write_config.config_yaml(), UPDATE
    committed = json.loads((write_config.ROOT / "config.schema.json").read_text(encoding="utf-8"))
    assert committed == write_config.config_schema(), UPDATE


def test_config_yaml_loads_back_to_exactly_the_defaults():
    values = yaml.safe_load(write_config.config_yaml())
    assert values == write_config.default_values()
    assert load(values) == Settings()


def test_no_line_of_config_yaml_is_wider_than_100_columns_and_every_setting_is_described():
    lines = write_config.config_yaml().splitlines()
    assert max(map(len, lines)) <= 100
    for before, line in pairwise(lines):
        assert line.lstrip().startswith("#") or not line or before.lstrip().startswith("# ")
    assert "None" not in "\n".join(lines)


def test_every_pack_sets_known_settings_and_tells_editors_where_the_schema_is():
    for name in packs.names():
        text = (write_config.ROOT / "packs" / name / "pack.yaml").read_text(encoding="utf-8")
        assert text.splitlines()[0] == "# yaml-language-server: $schema=../../config.schema.json"
        assert load(yaml.safe_load(text)).pack == name
