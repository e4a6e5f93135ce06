"""The packs by name. A new pack is one file here, or a line of `loras`, and one folder in packs/."""

from trainer.packs import demo, llada_image, loras, mageflow, pixart, qwen_image
from trainer.packs.base import Pack

_ADAPTERS = (demo.PACK, pixart.PACK, llada_image.PACK, mageflow.PACK, qwen_image.PACK)
_PACKS: dict[str, Pack] = {pack.name: pack for pack in (*_ADAPTERS, *loras.PACKS)}


def names() -> list[str]:
    """Names of all packs."""
    return list(_PACKS)


def get(name: str) -> Pack:
    """The pack of that name (a KeyError is a bug: settings are checked first)."""
    return _PACKS[name]
