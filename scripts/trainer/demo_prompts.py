"""Made-up prompts for the demo: word lists, and five ways to put them together, with room for over 1e12 prompts."""

import random
from collections.abc import Callable


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


# Singular and plural.
_BEINGS = [
    tuple(item.split("/"))
    for item in _listed(
        "fox/foxes, heron/herons, tabby cat/tabby cats, greyhound/greyhounds, elephant/elephants, octopus/octopuses, "
        "barn owl/barn owls, raven/ravens, polar bear/polar bears, wolf/wolves, stag/stags, hare/hares, goat/goats, "
        "tortoise/tortoises, whale/whales, seahorse/seahorses, butterfly/butterflies, beetle/beetles, koi carp/koi "
        "carp, penguin/penguins, flamingo/flamingos, hedgehog/hedgehogs, red panda/red pandas, chameleon/chameleons, "
        "horse/horses, otter/otters, parrot/parrots, jellyfish/jellyfish, dragon/dragons, phoenix/phoenixes, "
        "robot/robots, astronaut/astronauts, fisherman/fishermen, old woman/old women, young boy/young boys, "
        "dancer/dancers"
    )
]
_THINGS = [
    tuple(item.split("/"))
    for item in _listed(
        "teapot/teapots, typewriter/typewriters, bicycle/bicycles, sailing boat/sailing boats, lantern/lanterns, "
        "grandfather clock/grandfather clocks, violin/violins, pocket watch/pocket watches, steam train/steam trains, "
        "sports car/sports cars, hot air balloon/hot air balloons, spaceship/spaceships, submarine/submarines, "
        "tractor/tractors, tram/trams, windmill/windmills, lighthouse/lighthouses, castle/castles, cottage/cottages, "
        "skyscraper/skyscrapers, stone bridge/stone bridges, cathedral/cathedrals, greenhouse/greenhouses, "
        "treehouse/treehouses, pyramid/pyramids, fountain/fountains, statue/statues, oak tree/oak trees, "
        "sunflower/sunflowers, cactus/cacti, mushroom/mushrooms, bonsai/bonsai, rose/roses, pumpkin/pumpkins, bowl of "
        "ramen/bowls of ramen, loaf of bread/loaves of bread"
    )
]
_BEING_ADJECTIVES = _listed(
    "old, young, sleepy, curious, proud, tiny, huge, elegant, clumsy, fierce, gentle, lonely, cheerful, tired, brave, "
    "shy, wet, muddy"
)
_THING_ADJECTIVES = _listed(
    "old, antique, broken, polished, rusty, tiny, huge, elegant, abandoned, ornate, simple, dusty, glowing, cracked, "
    "forgotten, brand-new, handmade, floating"
)
_COLOURS = _listed(
    "red, crimson, orange, amber, yellow, golden, lime green, emerald, teal, turquoise, sky blue, navy blue, indigo, "
    "violet, lavender, magenta"
)
_MATERIALS = _listed(
    "wood, marble, porcelain, glass, brass, paper, wool, felt, ice, clay, bamboo, chrome, gold leaf, stained glass"
)
_CLOTHES = _listed(
    "a long raincoat, a straw hat, a velvet cloak, silver armour, a woollen scarf, a flowing silk dress, round "
    "glasses, a space suit, a leather jacket, a flower crown, muddy boots, a tweed suit"
)
_ACTIONS = _listed(
    "running through tall grass, sleeping under a blanket, reading a letter, looking at the stars, crossing a rope "
    "bridge, drinking tea, climbing a steep wall, chasing a shadow, waiting for the last bus, dancing in the rain, "
    "playing the cello, repairing an engine, carrying a heavy suitcase, jumping over a stream, eating noodles, "
    "painting a portrait, feeding pigeons, swimming against the current, standing on one leg, holding a paper "
    "lantern, walking along the shore, hiding behind a curtain, laughing out loud, staring into the distance, writing "
    "in a diary, blowing soap bubbles, digging for treasure, balancing on a tightrope"
)
_STATES = _listed(
    "covered in snow, wrapped in ivy, half sunk in mud, surrounded by candles, lying in the grass, hanging from the "
    "ceiling, lit from within, reflected in a puddle, seen through a keyhole, buried in autumn leaves, drifting in "
    "space, standing in shallow water, tied with a ribbon, full of holes, balanced on a rock, crowded with birds, cut "
    "in half, on fire"
)
_PLACES = _listed(
    "in a pine forest, on a city rooftop, by a frozen lake, inside an abandoned factory, in a crowded market, at the "
    "edge of a cliff, on a windswept moor, in a narrow alley, under a stone arch, in a desert of white sand, on a "
    "rocky beach, in a bamboo grove, inside a gothic library, at a petrol station, in a wheat field, on the deck of a "
    "ship, in an underground cave, beside a waterfall, in a small kitchen, at the opera, on the surface of Mars, in a "
    "rainy street in Tokyo, on a canal in Venice, in the old town of Prague, in the Scottish highlands, on a terrace "
    "above the sea, in a rice paddy, in an empty swimming pool, inside a space station, in a mountain village"
)
_TIMES = _listed(
    "at dawn, at sunrise, early in the morning, at noon, in the late afternoon, at sunset, at dusk, at midnight, on a "
    "summer evening, on a winter night, in early spring, in late autumn"
)
_LIGHTS = _listed(
    "soft morning light, golden hour, harsh midday sun, candlelight, neon lights, moonlight, dramatic side lighting, "
    "backlit, diffuse overcast light, volumetric light, a single spotlight, firelight, flickering fluorescent tubes, "
    "dappled light through leaves, deep shadows"
)
_MOODS = _listed(
    "calm, melancholic, eerie, joyful, tense, nostalgic, dreamlike, mysterious, heroic, romantic, bleak, whimsical, "
    "serene, chaotic, festive"
)
_STYLES = _listed(
    "oil painting, watercolour, charcoal sketch, ink drawing, woodcut, linocut print, pastel drawing, gouache, "
    "fresco, mosaic, 35mm photograph, polaroid, long exposure photograph, macro photograph, black and white "
    "photograph, tintype, pixel art, vector illustration, low poly render, 3d render, claymation still, stop motion "
    "puppet, papercut, collage, comic book panel, children's book illustration, botanical illustration, technical "
    "blueprint"
)
_VIEWS = _listed(
    "close-up, extreme close-up, wide shot, aerial view, view from below, view from behind, profile view, full body "
    "shot, head and shoulders, over-the-shoulder view, fisheye lens, telephoto lens"
)
_DETAILS = _listed(
    "highly detailed, minimalist, shallow depth of field, grainy film, sharp focus, muted colours, vivid colours, "
    "pastel palette, monochrome, rough brush strokes, fine lines, flat colours, soft edges, motion blur"
)
_WEATHER = _listed(
    "light rain, heavy snow, thick fog, a sandstorm, drifting clouds, a clear sky, falling leaves, a rainbow, strong "
    "wind, distant thunder"
)
_COUNTS = _listed("two, three, four, five, six, seven, a dozen, a pair of, a group of, hundreds of, a row of, several")


def prompts(count: int, seed: int) -> list[str]:
    """`count` prompts, few of them equal; the first ones are the same whatever `count` is."""
    chance = random.Random(seed)
    return [_prompt(chance) for _ in range(count)]


def _prompt(chance: random.Random) -> str:
    (form,) = chance.choices(list(_FORMS), list(_FORMS.values()))
    text = form(chance)
    # People write with and without capitals.
    return text[0].upper() + text[1:] if chance.random() < 0.35 else text


def _with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" and not words.startswith("uk") else "a ") + words


def _being(chance: random.Random) -> str:
    """One living being: `a sleepy fox`, `an old woman in a raincoat`, `three brave knights`."""
    one, many = chance.choice(_BEINGS)
    described = [chance.choice(_BEING_ADJECTIVES)] if chance.random() < 0.6 else []
    if chance.random() < 0.2:
        return " ".join([chance.choice(_COUNTS), *described, many])
    phrase = _with_article(" ".join([*described, one]))
    return f"{phrase} wearing {chance.choice(_CLOTHES)}" if chance.random() < 0.25 else phrase


def _thing(chance: random.Random) -> str:
    """One thing: `a rusty teal bicycle`, `an ornate teapot made of jade`, `a row of lighthouses`."""
    one, many = chance.choice(_THINGS)
    described = [chance.choice(_THING_ADJECTIVES)] if chance.random() < 0.5 else []
    described += [chance.choice(_COLOURS)] if chance.random() < 0.4 else []
    if chance.random() < 0.2:
        return " ".join([chance.choice(_COUNTS), *described, many])
    phrase = _with_article(" ".join([*described, one]))
    return f"{phrase} made of {chance.choice(_MATERIALS)}" if chance.random() < 0.25 else phrase


def _subject(chance: random.Random) -> str:
    """A being that does something or a thing in some state."""
    if chance.random() < 0.55:
        return f"{_being(chance)} {chance.choice(_ACTIONS)}"
    return f"{_thing(chance)} {chance.choice(_STATES)}"


def _noun_phrase(chance: random.Random) -> str:
    return f"{chance.choice((_being, _thing))(chance)} {chance.choice(_PLACES)}"


def _comma_list(chance: random.Random) -> str:
    extras = [
        chance.choice(listed)
        for listed in (_STYLES, _LIGHTS, _MOODS, _VIEWS, _DETAILS, _WEATHER)
        if chance.random() < 0.4
    ]
    chance.shuffle(extras)
    return ", ".join([_subject(chance), *extras, chance.choice(_STYLES)])


def _style_first(chance: random.Random) -> str:
    link = chance.choice([" of ", ": ", " showing "])
    return f"{_with_article(chance.choice(_STYLES))}{link}{_subject(chance)} {chance.choice(_PLACES)}"


def _sentence(chance: random.Random) -> str:
    place, time = chance.choice(_PLACES), chance.choice(_TIMES)
    order = chance.choice(["{subject} {place} {time}.", "{time}, {subject} {place}.", "{place}, {subject} {time}."])
    return order.format(subject=_subject(chance), place=place, time=time)


def _landscape(chance: random.Random) -> str:
    place = chance.choice(_PLACES).split(" ", 1)[1]
    return (
        f"{place} {chance.choice(_TIMES)}, {chance.choice(_WEATHER)}, {chance.choice(_MOODS)}, {chance.choice(_STYLES)}"
    )


_FORMS: dict[Callable[[random.Random], str], float] = {
    _noun_phrase: 20,
    _comma_list: 35,
    _style_first: 20,
    _sentence: 20,
    _landscape: 5,
}
