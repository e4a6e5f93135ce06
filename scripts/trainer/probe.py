"""Prompts of other kinds than those that adapters are trained on, the same for every run: the split `probe`.

They are never trained on and no checkpoint is chosen by them, so that they tell whether an adapter has learnt the
teacher or only how its training prompts are written.
"""

from functools import cache
from pathlib import Path

# By kind, which is the source of its samples and the name of its file.
KINDS = {
    "word": "a single word",
    "question": "questions and commands",
    "caption": "descriptions of several sentences",
    "tags": "lists of tags",
}


@cache
def prompts() -> list[tuple[str, str]]:
    """Kind and text of each prompt. Cleaning (`corpus.clean`) would leave them as they are."""
    folder = Path(__file__).parent / "probe_prompts"
    texts = {kind: (folder / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}
    return [(kind, text) for kind, lines in texts.items() for text in lines.splitlines()]
