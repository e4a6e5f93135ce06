"""Instructions made from captions: the mix, what they are about, and what they follow from."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import instructions
from trainer.prompt_cleaning import collapse, for_engine

CAPTIONS = ["A little girl in a red dress climbs the stairs.", "Two brown dogs run over snow"]
# The documented mix: `caption` is its 28.5 % and the 6 % that are left at the end.
SHARES = {
    "empty": 0.015,
    "caption": 0.345,
    "add": 0.12,
    "remove": 0.08,
    "replace": 0.06,
    "restyle": 0.12,
    "background": 0.08,
    "recolour": 0.06,
    "caption and style": 0.08,
    "keywords": 0.04,
}
WITHOUT = {"caption", "caption and style", "keywords"}


def drawn(captions, count=6000, empty=0.015, seed=0):
    return [instructions.one(captions, f"{seed}:{number}", empty) for number in range(count)]


@settings(max_examples=8, deadline=None)
@given(
    captions=st.lists(st.text("abc de", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=5),
    seed=st.integers(0, 10**9),
    empty=st.sampled_from([0.0, 0.015, 0.1]),
)
def test_the_mix_has_the_documented_shares_whatever_the_captions(captions, seed, empty):
    kinds = Counter(one.kind for one in drawn(captions, 3000, empty, seed))
    assert set(kinds) <= set(SHARES)
    for kind, share in SHARES.items():
        wanted = empty if kind == "empty" else share * (1 - empty) / 0.985
        assert abs(kinds[kind] / 3000 - wanted) < 0.04


def test_without_captions_the_other_kinds_take_their_shares():
    kinds = Counter(one.kind for one in drawn([]))
    assert not WITHOUT & set(kinds)
    left = 0.985 - sum(SHARES[kind] for kind in WITHOUT)
    for kind in set(SHARES) - WITHOUT - {"empty"}:
        assert abs(kinds[kind] / 6000 - SHARES[kind] * 0.985 / left) < 0.03
    assert abs(kinds["empty"] / 6000 - 0.015) < 0.01


@given(captions=st.lists(st.text(max_size=40).map(collapse).filter(bool), max_size=5), key=st.text(max_size=20))
def test_any_captions_give_an_instruction_and_always_the_same_one(captions, key):
    one = instructions.one(captions, key, 0.015)
    assert one == instructions.one(tuple(captions), key, 0.015)
    assert bool(one.text.strip()) == (one.kind != "empty")
    assert instructions.two(captions, [], key) == instructions.two(captions, [], key)
    assert instructions.two([], captions, key).text


def test_the_engine_reads_every_instruction_as_it_is_written():
    texts = {one.text for one in drawn(CAPTIONS)}
    texts |= {instructions.two(CAPTIONS, CAPTIONS, str(number)).text for number in range(500)}
    assert len(texts) > 200
    assert {text for text in texts if for_engine(text) != text} == set()
    assert not any("{" in text or "  " in text for text in texts)


def test_two_pictures_have_six_kinds_in_equal_shares():
    kinds = Counter(instructions.two(CAPTIONS, CAPTIONS, str(number)).kind for number in range(3000))
    assert len(kinds) == 6
    assert all(abs(count / 3000 - 1 / 6) < 0.04 for count in kinds.values())
    described = {instructions.two(["a"], CAPTIONS, str(number)) for number in range(300)}
    assert {one.text for one in described if one.kind == "two: description"} == set(CAPTIONS)
    uncaptioned = Counter(instructions.two(CAPTIONS, [], str(number)).kind for number in range(300))
    assert len(uncaptioned) == 5
    assert "two: description" not in uncaptioned


@pytest.mark.parametrize(
    ("caption", "subject"),
    [
        ("A man in a blue shirt is standing on a ladder.", "man"),
        ("Two young guys with shaggy hair look at their hands", "young guys"),
        ("A little girl climbing into a wooden playhouse.", "little girl"),
        ("A black dog and a spotted dog are fighting", "black dog"),
        ("Several men in hard hats", "men"),
        ("An Asian woman and her dog", "woman"),
        ("There is a cat", ""),
        ("Someone sits", ""),
        ("", ""),
    ],
)
def test_an_instruction_is_about_what_the_caption_is_about(caption, subject):
    assert instructions._about(caption) == subject
    texts = {instructions.one([caption], str(number), 0).text for number in range(300)} if caption else set()
    if subject:
        assert any(text.startswith(f"Replace the {subject} with ") for text in texts)
        assert not any("main subject" in text for text in texts)


def test_keywords_are_two_to_five_words_of_a_caption():
    texts = [one.text for one in drawn(CAPTIONS) if one.kind == "keywords"]
    assert {len(text.split()) for text in texts} == {2, 3, 4, 5}
    assert all(any(caption.startswith(text) for caption in CAPTIONS) for text in texts)
    assert {one.text for one in drawn(["dog"]) if one.kind == "keywords"} == {"dog"}


def test_captions_with_spaces_before_their_marks_are_tidied():
    assert instructions.tidy("A dog , a cat ; and .5 of a bird .") == "A dog, a cat; and .5 of a bird."
