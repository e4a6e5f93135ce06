import random
import statistics

from trainer import demo_prompts, near_duplicates
from trainer.prompt_cleaning import for_engine

PROMPTS = demo_prompts.prompts(5200, seed=8)


def test_the_seed_decides_the_prompts_and_more_of_them_begin_the_same():
    assert demo_prompts.prompts(5200, seed=8) == PROMPTS
    assert demo_prompts.prompts(100, seed=8) == PROMPTS[:100]
    assert not set(demo_prompts.prompts(1000, seed=9)) >= set(PROMPTS[:20])


def test_hardly_any_prompt_comes_twice():
    assert len({prompt.casefold() for prompt in PROMPTS}) > 0.995 * len(PROMPTS)
    kept = near_duplicates.kept(PROMPTS, held_out=0, threshold=0.8, limit=len(PROMPTS))
    assert sum(kept) > 0.99 * len(PROMPTS)


def test_prompts_differ_in_words():
    chance = random.Random(0)
    pairs = [near_duplicates.similarity(*chance.sample(PROMPTS, 2)) for _ in range(4000)]
    assert sum(similarity < 0.5 for similarity in pairs) > 0.999 * len(pairs)
    assert sum(similarity < 0.2 for similarity in pairs) > 0.95 * len(pairs)
    assert len({word for prompt in PROMPTS for word in near_duplicates.words(prompt)}) > 400


def test_prompts_are_short_and_long_and_of_several_forms():
    lengths = [len(prompt) for prompt in PROMPTS]
    assert 60 < statistics.mean(lengths) < 140
    assert min(lengths) >= 8
    assert max(lengths) < 600
    for low, high in ((8, 50), (50, 100), (100, 200)):
        assert sum(low <= length < high for length in lengths) > 0.05 * len(lengths)
    assert 0.1 < sum(prompt.endswith(".") for prompt in PROMPTS) / len(PROMPTS) < 0.5
    assert 0.3 < sum("," in prompt for prompt in PROMPTS) / len(PROMPTS) < 0.9


def test_prompts_are_clean_already():
    assert all(for_engine(prompt) == prompt for prompt in PROMPTS)
