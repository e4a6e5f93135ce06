"""What is drawn by chance: each number is a function of a seed, of what it is drawn for, and of a position.

So no state is to be saved, training resumes exactly wherever it was stopped, and one more thing that is drawn changes
none of the others.
"""

import zlib

import numpy as np


def at(seed: int, stream: str, position: int) -> np.random.Generator:
    """The source of what is drawn for a purpose (`stream`) at a position, such as that of an item in the training."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), position])
