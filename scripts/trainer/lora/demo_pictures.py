"""The pictures of the demo: a made-up creature, the zwirl, in a dozen places; drawn the same every time.

A zwirl is a round orange body with one large eye, a spiral tail and two feet. Places, sizes and shapes of the pictures
differ, so that a LoRA has one thing to learn.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

from trainer.files import write_text

_Place = Callable[[ImageDraw.ImageDraw, int, int, random.Random], None]

_FINER = 4  # pixels drawn for one that is kept, on each side
_ORANGE, _DARK, _WHITE = "#f28c28", "#3a2212", "#fdfaf2"


def make(folder: str | Path) -> None:
    """Write the pictures as PNG files, and their captions beside them."""
    for number, (size, place, caption, share) in enumerate(_PICTURES, 1):
        stem = Path(folder) / f"zwirl-{number:02d}"
        write_text(stem.with_suffix(".txt"), caption + "\n")
        draw(number, size, place, share).save(stem.with_suffix(".png"))


def draw(number: int, size: tuple[int, int], place: _Place, share: float) -> Image.Image:
    """A zwirl in a place.

    Args:
        number: seed of all that varies.
        size: width and height, in pixels.
        place: draws the background.
        share: the zwirl's height, as a share of the shorter side.
    """
    width, height = (side * _FINER for side in size)
    chance = random.Random(number)
    image = Image.new("RGB", (width, height))
    pen = ImageDraw.Draw(image)
    place(pen, width, height, chance)
    radius = share * min(width, height) / 2
    _zwirl(pen, width * chance.uniform(0.4, 0.6), height * 0.9 - radius * 1.3, radius, chance.choice((-1, 1)))
    return image.resize(size, Image.Resampling.BOX)


def _zwirl(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, side: int) -> None:
    def disc(x: float, y: float, radius: float, colour: str) -> None:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)

    for place in range(200):  # the tail, thick to thin
        turn = place / 200
        angle, reach = turn * 4 * math.pi, radius * 0.55 * (1 - turn)
        tail = x + side * (radius * 1.35 - reach * math.cos(angle)), y - reach * math.sin(angle)
        disc(*tail, radius * (0.14 - 0.08 * turn), _ORANGE)
    for foot in (-0.45, 0.45):
        disc(x + foot * radius, y + radius, radius * 0.25, _DARK)
    disc(x, y, radius, _ORANGE)
    disc(x - side * radius * 0.2, y - radius * 0.2, radius * 0.5, _WHITE)
    disc(x - side * radius * 0.3, y - radius * 0.2, radius * 0.24, _DARK)


def _bands(*colours: str) -> _Place:
    """Horizontal bands from top to bottom, the last one as high as the others together."""

    def place(pen: ImageDraw.ImageDraw, width: int, height: int, chance: random.Random) -> None:
        top = 0.0
        for band, colour in enumerate(colours):
            pen.rectangle((0, top, width, height), fill=colour)
            top += height * 0.6 / (len(colours) - 1) * chance.uniform(0.9, 1.1) if band < len(colours) - 1 else 0

    return place


def _scattered(ground: str, colour: str, shape: str) -> _Place:
    """Forty of one shape on a ground: `disc`, `stem` or `block`."""

    def place(pen: ImageDraw.ImageDraw, width: int, height: int, chance: random.Random) -> None:
        pen.rectangle((0, 0, width, height), fill=ground)
        unit = min(width, height) / 30
        for _ in range(40):
            x, y = chance.random() * width, chance.random() * height
            if shape == "stem":
                pen.rectangle((x, y - 6 * unit, x + unit / 2, y + 6 * unit), fill=colour)
            elif shape == "block":
                pen.rectangle((x - 2 * unit, y - unit, x + 2 * unit, y + unit), fill=colour)
            else:
                pen.ellipse((x - unit, y - unit, x + unit, y + unit), fill=colour)

    return place


_PICTURES: tuple[tuple[tuple[int, int], _Place, str, float], ...] = (
    ((192, 192), _bands("#9fd3f0", "#6ab04c"), "a zwirl on a meadow under a blue sky", 0.6),
    ((256, 144), _bands("#f7b267", "#f25c54", "#7a3b69"), "a zwirl in front of a sunset", 0.7),
    ((144, 256), _scattered("#10284a", "#f6f3d7", "disc"), "a zwirl under the stars at night", 0.5),
    ((224, 160), _bands("#cfe8f5", "#2f6f9f", "#e8d8a0"), "a zwirl on a beach by the sea", 0.6),
    ((160, 224), _scattered("#1e4d2b", "#5b3a1e", "stem"), "a zwirl in a dark forest", 0.5),
    ((192, 192), _scattered("#a34a33", "#8a3c29", "block"), "a zwirl in front of a brick wall", 0.5),
    ((208, 176), _scattered("#e9eef4", "#ffffff", "disc"), "a zwirl in falling snow", 0.6),
    ((176, 208), _bands("#d9c2a7", "#9a6b43"), "a zwirl on a wooden table", 0.55),
    ((256, 128), _bands("#f3e3b3", "#e0b45c", "#c98f3d"), "a small zwirl in a wide desert", 0.6),
    ((128, 224), _bands("#b7c4cf", "#8d99a6", "#5f6c7b"), "a zwirl in the fog", 0.5),
    ((240, 192), _scattered("#4fa3c7", "#a9dbe9", "disc"), "a zwirl under water among bubbles", 0.55),
    ((192, 240), _scattered("#efe7fa", "#b497d6", "block"), "a zwirl in front of purple wallpaper", 0.5),
)
