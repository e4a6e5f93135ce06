"""What a dry run says: the reason of each job in a short line, and at its end a line for each stage that would run.

Both are read from Snakemake's log events, which are made for programs.
"""

import logging
from pathlib import Path

from snakemake_interface_logger_plugins.common import LogEvent

from trainer.status import STAGE_OF, STAGES

_NAMED = 3


def shorten(record: logging.LogRecord) -> bool:
    """A filter that passes everything: of the files in a job's reason it leaves the first few, and `why` in words."""
    if getattr(record, "event", None) == LogEvent.JOB_INFO:
        record.why = why(record.reason)
        record.reason = "; ".join(_short(title, files) for title, files in _parts(record.reason))
    return True


def _parts(reason: str) -> list[tuple[str, list[str]]]:
    """The parts of a reason, such as `Missing output files: a, b; Updated input files: c`, with their files."""
    parts = (part.partition(": ") for part in reason.split("; "))
    return [(title, sorted(filter(None, files.split(", ")))) for title, _, files in parts]


def _short(title: str, files: list[str]) -> str:
    if not files:
        return title
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return f"{title}: {', '.join(files[:_NAMED])}{more}"


class Plan(logging.Handler):
    """Collects the jobs that a dry run lists, after `shorten` has seen them, and tells them by stage at its end."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self.stages: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a job."""
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            stage = STAGE_OF.get(record.rule_name, record.rule_name)
            if stage != "all":
                self.stages.setdefault(stage, []).append(record.why)

    def close(self) -> None:
        """Tell the plan, once."""
        if self.stages:
            print(f"\nWhat would run in {self.run}, by stage:\n{self.text()}", flush=True)
            self.stages = {}
        super().close()

    def text(self) -> str:
        """A line a stage: its name, the number of its jobs, and why."""
        order = [*STAGES, *sorted(self.stages.keys() - set(STAGES))]
        return "\n".join(_line(stage, self.stages[stage]) for stage in order if stage in self.stages)


def _line(stage: str, reasons: list[str]) -> str:
    # Of a stage whose own files or settings ask for it, what comes before it says nothing more.
    told = [reason for reason in dict.fromkeys(reasons) if reason != FOLLOWS] or [FOLLOWS]
    return f"  {stage:<11} {len(reasons):>4} job{'s' if len(reasons) > 1 else ' '}  {', '.join(told)}"


FOLLOWS = "what it reads is made anew"
_WHY = {
    "Missing output files": "not made yet",
    "Incomplete output files": "was interrupted",
    "Input files updated by another job": FOLLOWS,
    "Forced execution": "forced",
    "Rules with a run or shell declaration but no output are always executed.": "asked for",
    "Rules with neither input nor output files are always executed.": "asked for",
}


def why(reason: str) -> str:
    """A reason of Snakemake's in a few words; the first that counts."""
    parts = dict(_parts(reason))
    if files := parts.get("Updated input files"):
        settings = [file for file in files if Path(file).parent.name == "settings"]
        return "its settings changed" if settings else f"newer: {', '.join(Path(file).name for file in files[:_NAMED])}"
    return next((words for title, words in _WHY.items() if title in parts), next(iter(parts)).lower())
