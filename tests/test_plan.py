"""What a dry run says at its end: real dry runs of the real command line."""

import re

import pytest
from trainer import plan
from workflow import Project


def planned(made, *arguments):
    """The lines of the summary by stage: the number of jobs and the reason."""
    output = made.snakemake("--dry-run", *arguments)
    _, found, text = output.partition("by stage:\n")
    rows = re.findall(r"^  (\w+) +(\d+) jobs?  (.*)$", text, re.MULTILINE)
    assert bool(found) == bool(rows)
    return {stage: (int(count), reason.strip()) for stage, count, reason in rows}, output


@pytest.fixture
def made(tmp_path):
    """A run of pixart of which nothing is there."""
    return Project(tmp_path, {"pack": "pixart", "run": "r", "corpus": {"n_train": 60000}})


def test_a_dry_run_ends_with_a_line_a_stage_that_counts_all_its_jobs(made):
    stages, output = planned(made)
    assert list(stages) == ["materials", "corpus", "precompute", "train", "export", "evaluate", "report"]
    assert {reason for _, reason in stages.values()} == {"not made yet"}
    total = int(output.rsplit("total", 1)[1].split()[0])
    assert sum(count for count, _ in stages.values()) == total - 1  # all but the rule `all`
    assert output.rstrip().endswith("not made yet")


def test_reasons_in_a_dry_run_name_a_few_files_and_count_the_rest(made):
    _, output = planned(made)
    line = next(line for line in output.splitlines() if "Missing output files: runs/r/shards.json" in line)
    assert re.search(r"runs/r/shards/train/0001\.json and \d+ more$", line)
    assert max(map(len, re.findall(r"^Reason: .*$", output, re.MULTILINE))) < 300


def test_a_quiet_dry_run_is_the_summary_and_a_few_lines_more(made):
    stages, output = planned(made, "--quiet", "host", "rules", "progress")
    assert stages["precompute"][0] > 8
    assert len(output.splitlines()) < 25


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Missing output files: a; Input files updated by another job: b", "not made yet"),
        ("Updated input files: runs/r/corpus.json, runs/r/settings/train.json", "its settings changed"),
        ("Updated input files: runs/r/shards.json; Input files updated by another job: b", "newer: shards.json"),
        ("Input files updated by another job: runs/r/shards.json", plan.FOLLOWS),
        ("Forced execution", "forced"),
        ("Incomplete output files: a", "was interrupted"),
        ("Something new: a", "something new"),
    ],
)
def test_reasons_are_told_in_a_few_words(reason, words):
    assert plan.why(reason) == words


def test_a_stage_tells_only_what_asks_for_it_itself():
    told = plan.Plan("runs/r")
    told.stages = {"precompute": [plan.FOLLOWS, "not made yet", "not made yet"], "train": [plan.FOLLOWS]}
    assert told.text().splitlines() == [
        "  precompute     3 jobs  not made yet",
        f"  train          1 job   {plan.FOLLOWS}",
    ]
