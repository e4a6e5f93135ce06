r"""The text of a prompt as it is trained: what the engine encodes, in characters that all tokenizers read alike.

The engine reads `( ) [ ]`, `\`, `(x:1.3)`, `BREAK` and `<lora:...>` as syntax: it takes them out and encodes the pieces
between them. Its tokenizers also differ from those of the Hugging Face libraries on some characters (they do
not normalise unicode, know no digits but ASCII ones, and skip many symbols) and on white space around T5's special
tokens; `for_engine` folds or removes these. tests/test_engine.py compares with the engine itself.
"""

import re
import unicodedata
from functools import cache

_T5_SPECIAL = re.compile(r"</s>|<pad>|<unk>|<extra_id_\d+>")
_LORA = re.compile(r"<lora:[^:>]+:[^>]+>")
_WEIGHT = re.compile(r":\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)\s*(?=\))")
_BREAK = re.compile(r"\bBREAK\b", re.ASCII)
_BRACKETS = re.compile(r" ?[()\[\]\\][ ()\[\]\\]*(?=([,.;:!?])?)")
# From here on its table of punctuation, marks and symbols has gaps: it skips one emoji in seven, for instance.
_GAPS = "\ua490"
# The engine writes contractions in lower case (DON'T -> DON't) where they follow a word or begin the text.
_CONTRACTION = re.compile(r"(?:(?<=\w)|^)'(?:[sdmt]|ll|re|ve)", re.IGNORECASE)


def collapse(text: str) -> str:
    """Every run of white space as one space, none at the ends."""
    return " ".join(text.split())


def for_engine(text: str) -> str:
    """A prompt without prompt-weight syntax and without characters that tokenizers disagree on; idempotent.

    A bracket becomes a space, because the engine encodes what is on its two sides apart; before a punctuation mark,
    where there is nothing to keep apart, it goes together with the spaces around it.
    """
    text = collapse(text)
    if not (text.isascii() and text.isprintable()):
        # Invisible characters first: what they kept apart may compose.
        text = unicodedata.normalize("NFKC", "".join(map(_visible, text)))
        text = collapse("".join(map(_common, text)))
    if any(character in text for character in "()[]\\"):
        text = _WEIGHT.sub("", text)
        text = _BRACKETS.sub(lambda match: "" if match[1] else " ", text)
    if "<" in text:
        # A special token inside of a lora's name has to go first: what is left would be a lora the next time.
        text = _LORA.sub(" ", _T5_SPECIAL.sub(" ", text))
    if "BREAK" in text:
        text = _BREAK.sub(" ", text)
    text = collapse(text)
    if "'" in text:
        text = _CONTRACTION.sub(lambda match: match[0].lower(), text)
    return text


@cache
def _visible(character: str) -> str:
    """The character, or nothing for controls, format characters, unassigned code points and marks the engine skips."""
    category = unicodedata.category(character)
    return "" if category.startswith("C") or (category.startswith("M") and character >= _GAPS) else character


@cache
def _common(character: str) -> str:
    """The character, an ASCII digit for any decimal digit, or a space for what only some tokenizers know."""
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category.startswith("N"):
        return str(unicodedata.decimal(character, " "))
    # SentencePiece reads its own word mark as a space.
    skipped = character >= _GAPS and not category.startswith("L")
    return " " if skipped or character == "\N{LOWER ONE EIGHTH BLOCK}" else character
