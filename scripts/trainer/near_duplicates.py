"""Which prompts are almost the same as one before them: an exact search, so that nothing slips through.

Two prompts are near duplicates if the Jaccard similarity of their sets of words and word pairs reaches a threshold t.
The search is a prefix-filtered join (Chaudhuri et al. 2006, "A primitive operator for similarity joins in data
cleaning"; with prefixes for k as Wang et al. 2012, "Can we beat the prefix filtering?"): with the members of all sets
in one order, rarest first, two sets with J(x, y) >= t share k members among the first |x| - ceil(t |x|) + k of x and as
many of y. So only these are indexed, and every candidate is verified. MinHash, the usual way, misses pairs by chance;
here a missed pair would be a val prompt in train.
"""

import math
import re
from collections import Counter
from collections.abc import Collection
from itertools import chain, pairwise
from typing import Any

import numpy as np

# Letters of scripts that write no spaces are words of their own.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
# The k above. More means longer prefixes and fewer candidates; 3 was fastest of 1 to 3 on lists of 30,000 and more.
_SHARED = 3
# Keeps a product of two floats that should be whole from being rounded up.
_SLACK = 1e-9


def words(text: str) -> list[str]:
    """The words of a text, case folded, without punctuation."""
    return _WORD.findall(text.casefold())


def similarity(first: str, second: str) -> float:
    """Jaccard similarity of the sets of words and word pairs of two texts; 0 if either has no words."""
    one, two = ({*listed, *pairwise(listed)} for listed in (words(first), words(second)))
    return _jaccard(one, two) if one and two else 0.0


def kept(texts: list[str], held_out: int, threshold: float, limit: int) -> list[bool]:
    """Whether each text is kept, going through them in order; near duplicates of one before are not.

    The first `held_out` texts are compared with the kept ones before them. The others are compared with the kept ones
    and with all held-out ones, kept or not, so that the two parts share nothing.

    Args:
        texts: the texts, in order of precedence.
        held_out: how many of them, from the first, belong to the held-out part.
        threshold: the Jaccard similarity, in (0, 1], from which two texts count as one.
        limit: the search ends when that many of the other texts are kept.

    Returns:
        One bool a text; shorter than `texts` if the limit was reached before the last one.
    """
    members, starts = _members(texts)
    index: dict[int, list[int]] = {}
    sizes = np.diff(starts).tolist()
    results: list[bool] = []
    found = 0
    for number, size in enumerate(sizes):
        if found == limit:
            break
        is_held_out = number < held_out
        listed = members[starts[number] : starts[number + 1]].tolist()
        # No set with a smaller overlap, and none of a size beyond these, can be similar enough.
        overlap = math.ceil(threshold * size - _SLACK)
        largest = size / threshold + _SLACK
        shared = min(_SHARED, overlap)
        prefix = listed[: size - overlap + shared]
        candidates = Counter(chain.from_iterable(index.get(member, ()) for member in prefix))
        mine = set(listed)
        duplicate = any(
            count >= shared
            and overlap <= sizes[other] <= largest
            and (results[other] or not is_held_out)
            and _jaccard(mine, members[starts[other] : starts[other + 1]].tolist()) >= threshold
            for other, count in candidates.items()
        )
        results.append(not duplicate)
        found += not (duplicate or is_held_out)
        if is_held_out or not duplicate:
            for member in prefix:
                index.setdefault(member, []).append(number)
    return results


def _jaccard(one: set[Any], other: Collection[Any]) -> float:
    """Of two sets, the second of which may be a list without repetitions; not both empty."""
    shared = len(one.intersection(other))
    return shared / (len(one) + len(other) - shared)


def _members(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sets as ranks of their members, rarest first.

    Returns:
        Ranks int32[N], ascending in each set, and starts int64[texts + 1]: set i is ranks[starts[i]:starts[i + 1]].
    """
    ids: dict[str, int] = {}
    listed = [[ids.setdefault(word, len(ids) + 1) for word in words(text)] for text in texts]
    counts = np.fromiter(map(len, listed), np.int64, len(listed))
    word = np.fromiter(chain.from_iterable(listed), np.int64, counts.sum())
    del listed
    owner = np.repeat(np.arange(len(texts)), counts)
    pair = (word[:-1] << 32 | word[1:])[owner[:-1] == owner[1:]]
    pair_owner = owner[:-1][owner[:-1] == owner[1:]]
    _, member, uses = np.unique(np.concatenate([word, pair]), return_inverse=True, return_counts=True)
    rank = np.empty(len(uses), np.int64)
    rank[np.argsort(uses, kind="stable")] = np.arange(len(uses))
    # Owner and rank in one number: sorted and unique, these are the sets one after the other.
    sets = np.unique(np.concatenate([owner, pair_owner]) << 32 | rank[member])
    starts = np.searchsorted(sets >> 32, np.arange(len(texts) + 1))
    return (sets & 0xFFFFFFFF).astype(np.int32), starts
