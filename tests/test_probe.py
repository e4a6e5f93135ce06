"""The probe prompts: enough of each kind, unlike the demo's, and the same whatever the settings."""

from collections import Counter

from trainer import config, demo_prompts, near_duplicates, probe
from trainer.prompt_cleaning import for_engine

PROMPTS = probe.prompts()


def test_there_are_forty_different_prompts_of_each_kind_as_it_says():
    assert Counter(kind for kind, _ in PROMPTS) == dict.fromkeys(probe.KINDS, 40)
    assert len({text.casefold() for _, text in PROMPTS}) == len(PROMPTS)
    for kind, text in PROMPTS:
        words, sentences = len(text.split()), sum(map(text.count, (". ", "? ", "! "))) + 1
        match kind:
            case "word":
                assert words == 1
            case "question":
                assert 6 <= words <= 20
                assert text[-1] in ".?"
            case "caption":
                assert 50 <= words <= 120
                assert 3 <= sentences <= 6
            case "tags":
                assert text.count(", ") >= 7


def test_cleaning_leaves_them_as_they_are():
    assert [text for _, text in PROMPTS if for_engine(text) != text] == []


def test_they_are_unlike_each_other_and_unlike_the_demo_prompts():
    texts = [text for _, text in PROMPTS]
    assert all(near_duplicates.kept(texts, held_out=0, threshold=0.3, limit=len(texts)))
    demo = demo_prompts.prompts(2000, seed=8)
    assert all(near_duplicates.kept([*demo[:1], *texts], held_out=0, threshold=0.3, limit=161))
    known = {word for text in demo for word in near_duplicates.words(text)}
    words = {word for text in texts for word in near_duplicates.words(text)}
    assert len(words - known) > 1000


def test_other_probe_prompts_are_another_corpus_and_nothing_else_changes(tmp_path, monkeypatch):
    settings = config.load({"runs_dir": str(tmp_path)})
    before = config.stage_settings(settings)
    monkeypatch.setattr(probe, "prompts", lambda: [*PROMPTS[1:], ("word", "tapir")])
    after = config.stage_settings(settings)
    assert {stage for stage in after if after[stage] != before[stage]} == {"corpus"}


def test_they_are_one_job_of_precompute_in_any_run():
    for shard_size in (1, 10_000):
        settings = config.load({"precompute": {"shard_size": shard_size, "block_shards": 1}})
        assert (settings.blocks("probe"), settings.samples("probe")) == (1, 160)
