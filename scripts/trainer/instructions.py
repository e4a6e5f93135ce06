"""What an adapter is taught to be told about pictures: instructions and descriptions, made from captions.

An instruction follows from the captions of its picture and a key, and from nothing else: another picture in the corpus
changes no instruction of this one.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

_Thing = TypeVar("_Thing")
Captions = Sequence[str]


class Instruction(NamedTuple):
    """A text and the kind it is of."""

    kind: str
    text: str


def one(captions: Captions, key: str, empty: float) -> Instruction:
    """An instruction for one picture.

    Args:
        captions: its captions; without any, the kinds that need one leave their shares to the others.
        key: what the choice follows from.
        empty: the probability that there is no text.
    """
    dice = _Dice(key)
    if dice.uniform() < empty:
        return Instruction("empty", "")
    kinds = [kind for kind in _KINDS if captions or not kind.needs_caption]
    point = dice.uniform() * sum(kind.share for kind in kinds)
    for kind in kinds:
        point -= kind.share
        if point < 0:
            break
    return Instruction(kind.name, kind.write(captions, dice))


def two(first: Captions, second: Captions, key: str) -> Instruction:
    """An instruction for two pictures, of one of six kinds; a description of the second needs a caption of it."""
    dice = _Dice(key)
    patterns = dict(_PATTERNS)
    if not second:
        del patterns["description"]
    kind, texts = dice.choice(list(patterns.items()))
    text = dice.choice(texts).format(
        first=_subject(first, dice),
        second=_subject(second, dice),
        caption=dice.choice(second) if second else "",
    )
    return Instruction(f"two: {kind}", text)


def tidy(caption: str) -> str:
    """A caption as people write: no space before a punctuation mark."""
    return re.sub(r"\s+(?=[.,;:!?](?:\s|$))", "", caption)


class _Dice:
    """Draws that follow from a key. Only Random.random is used, which Python promises to keep the same."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def uniform(self) -> float:
        return self._random.random()

    def choice(self, things: Sequence[_Thing]) -> _Thing:
        return things[int(self._random.random() * len(things))]


_ACCESSORIES = [
    *("a straw hat", "round glasses", "a striped scarf", "a small backpack", "a flower crown", "a red umbrella"),
    *("a silver necklace", "leather gloves"),
]
_OBJECTS = [
    *("a vase of tulips", "a sleeping cat", "a wooden bench", "a stack of old books", "a paper lantern"),
    *("a vintage bicycle", "a hot air balloon", "a potted fern", "a bowl of oranges", "a street lamp", "a toy robot"),
]
_WEATHER = [
    *("light rain", "falling snow", "morning mist", "a rainbow in the sky", "drifting autumn leaves"),
    *("storm clouds on the horizon", "a few soap bubbles in the air"),
]
_STYLES = [
    *("a watercolor painting", "an oil painting", "a pencil sketch", "a comic book page", "a pixel art scene"),
    *("a woodcut print", "a stained glass window", "a claymation still", "a faded film photograph"),
    *("a charcoal drawing", "a paper collage", "a low poly render"),
]
_TIMES = ["a scene at dawn", "a scene at sunset", "a moonlit night", "a foggy winter morning", "a bright summer noon"]
_PLACES = [
    *("a sandy beach", "a pine forest", "a busy night market", "a snowy mountain pass", "a quiet library"),
    *("a desert with dunes", "a field of sunflowers", "a city rooftop", "an empty theater stage"),
    *("a flooded cave", "a railway station", "a space station"),
]
_COLOURS = ["crimson", "blue", "green", "orange", "purple", "pink", "turquoise", "gold", "silver", "copper"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that do not name what a caption is about: before it stand these,
_BEFORE = _words(
    "a an the this that these those some several many few two three four five six seven eight nine ten one "
    "another each every both all various couple group bunch pair lot number of his her their its our my your "
    "asian african american"
)
# and these, which are kept with it.
_ADJECTIVES = _words(
    "young old older elderly little small tiny large big huge giant tall short long tan dark light bright black "
    "white brown blonde red blue green yellow orange purple pink gray grey colorful spotted striped empty busy "
    "wooden metal wet dry hairy bald beautiful pretty happy smiling female male adult "
    "teenage professional sleeping snowy grassy sandy rocky modern antique vintage"
)
# It cannot be one of these.
_NO_SUBJECT = _words(
    "there here and are was were has have had with without from into onto over under near while who what when "
    "where which they them she him someone somebody view close picture photo image shot for"
)


def _subject(captions: Captions, dice: _Dice) -> str:
    """What one of the captions is about, such as `little girl`; without captions, `main subject`."""
    subjects = [subject for caption in captions if (subject := _about(caption))]
    return dice.choice(subjects) if subjects else "main subject"


def _about(caption: str) -> str:
    found = []
    for word in re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", caption.lower()):
        if word in _ADJECTIVES:
            found.append(word)
        elif word not in _BEFORE:
            return " ".join([*found, word]) if len(word) > 2 and word not in _NO_SUBJECT else ""
    return ""


def _caption(captions: Captions, dice: _Dice) -> str:
    return dice.choice(captions)


def _addition(captions: Captions, dice: _Dice) -> str:
    thing = dice.choice([*_ACCESSORIES, *_OBJECTS, *_WEATHER])
    return dice.choice(["Add {}.", "Put {} into the picture.", "The same picture, now with {}."]).format(thing)


def _removal(captions: Captions, dice: _Dice) -> str:
    subject = _subject(captions, dice)
    return dice.choice(["Remove the {}.", "Take the {} out and fill in what is behind."]).format(subject)


def _replacement(captions: Captions, dice: _Dice) -> str:
    return f"Replace the {_subject(captions, dice)} with {dice.choice([*_ACCESSORIES, *_OBJECTS])}."


def _style(captions: Captions, dice: _Dice) -> str:
    pattern = dice.choice(["Turn this into {}.", "Redo the picture as {}.", "Make it look like {}."])
    return pattern.format(dice.choice([*_STYLES, *_TIMES]))


def _background(captions: Captions, dice: _Dice) -> str:
    pattern = dice.choice(["Change the background to {}.", "Move everything to {}, and keep the foreground."])
    return pattern.format(dice.choice(_PLACES))


def _recolouring(captions: Captions, dice: _Dice) -> str:
    return f"Recolor the {_subject(captions, dice)} in {dice.choice(_COLOURS)}."


def _styled_caption(captions: Captions, dice: _Dice) -> str:
    return f"{dice.choice(captions).rstrip(' .')}, {dice.choice([*_STYLES, *_TIMES])}"


def _keywords(captions: Captions, dice: _Dice) -> str:
    words = dice.choice(captions).split()
    return " ".join(words[: dice.choice(range(2, max(2, min(5, len(words))) + 1))])


class _Kind(NamedTuple):
    name: str
    share: float  # of all instructions that are not empty, together 0.985: the empty ones were 0.015 of the mix
    write: Callable[[Captions, _Dice], str]
    needs_caption: bool = False


_KINDS = [
    _Kind("caption", 0.345, _caption, needs_caption=True),
    _Kind("add", 0.12, _addition),
    _Kind("remove", 0.08, _removal),
    _Kind("replace", 0.06, _replacement),
    _Kind("restyle", 0.12, _style),
    _Kind("background", 0.08, _background),
    _Kind("recolour", 0.06, _recolouring),
    _Kind("caption and style", 0.08, _styled_caption, needs_caption=True),
    _Kind("keywords", 0.04, _keywords, needs_caption=True),
]

_PATTERNS = {
    "combine": [
        "Bring the {first} of the first picture and the {second} of the second into one scene.",
        "One picture that shows both the {first} and the {second}.",
    ],
    "insert": [
        "Put the {first} of image 1 into image 2.",
        "Show the {first} of the first picture in the surroundings of the second.",
    ],
    "blend": ["Blend the two pictures into one.", "Let the first picture fade into the second."],
    "style": [
        "Redo image 1 in the style of image 2.",
        "Keep what the first picture shows and take colours and light from the second.",
    ],
    "side by side": ["Place the two pictures side by side.", "Show image 1 on the left and image 2 on the right."],
    "description": ["{caption}"],
}
