"""The area, in pixels, that the reference pictures of a sample are scaled to: drawn for each sample, always the same.

An engine scales them to the area of its output, so an adapter has to meet several.
"""

import hashlib
from collections.abc import Sequence


def draw(images: Sequence[str], text: str, shares: Sequence[tuple[int, float]], two_image_max: int) -> int:
    """The area of a sample.

    Args:
        images: names of its pictures, as corpus_files.Sample has them.
        text: its text.
        shares: areas and the weights they are drawn with.
        two_image_max: the largest area that samples of more than one picture take; where all are larger, they take
            the smallest.
    """
    if len(images) > 1:
        shares = [one for one in shares if one[0] <= two_image_max] or [min(shares)]
    key = "|".join([*images, text])
    point = int.from_bytes(hashlib.sha1(key.encode()).digest()[:8], "big") / 2**64 * sum(share for _, share in shares)
    for area, share in shares:
        point -= share
        if point < 0:
            return area
    return shares[-1][0]
