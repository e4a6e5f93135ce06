"""Which pictures are almost the same: an exact search among their thumbnails, so that nothing slips through.

Two pictures are near-identical if their thumbnails differ by no more than `RADIUS` in root mean square: a picture and
its copies in another size, quality or format are, and so are the shots of one burst. They, and what is near-identical
to them in turn, are one group.

The means of two thumbnails differ by no more than their root mean square difference does. So, in order of the means,
each is compared only with those shortly after it, in blocks, as a matrix product.
"""

import numpy as np

RADIUS = 3.0  # of 255; a JPEG of quality 30, scaled to a third, is 1.3 away
_BLOCK = 2048


def groups(thumbnails: np.ndarray) -> np.ndarray:
    """The group of each picture.

    Args:
        thumbnails: uint8[pictures, values].

    Returns:
        int64[pictures]: the index of one picture of the group, the same for all of its pictures.
    """
    count, values = thumbnails.shape
    means = thumbnails.mean(axis=1)
    order = np.argsort(means, kind="stable")
    means = means[order]
    # Sums of products of bytes are whole numbers below 2^24 (for up to 258 values): f32 holds them exactly.
    rows = thumbnails[order].astype(np.float32)
    squares = np.einsum("ij,ij->i", rows, rows)
    parents = np.arange(count)
    for top in range(0, count, _BLOCK):
        bottom = min(top + _BLOCK, count)
        end = int(np.searchsorted(means, means[bottom - 1] + RADIUS, side="right"))
        for left in range(top, end, _BLOCK):
            right = min(left + _BLOCK, end)
            products = rows[top:bottom] @ rows[left:right].T
            distances = squares[top:bottom, None] + squares[left:right] - 2 * products
            near = distances <= values * RADIUS**2
            if left == top:
                np.fill_diagonal(near, False)
            for row in np.flatnonzero(near.any(axis=1)):
                for label in np.unique(parents[left + np.flatnonzero(near[row])]):
                    _join(parents, top + int(row), int(label))
    found = np.empty(count, np.int64)
    found[order] = order[[_root(parents, number) for number in range(count)]]
    return found


def _root(parents: np.ndarray, number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = int(parents[number])
    return number


def _join(parents: np.ndarray, one: int, other: int) -> None:
    one, other = _root(parents, one), _root(parents, other)
    parents[max(one, other)] = min(one, other)
