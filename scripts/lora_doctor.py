"""The questions to ask of a LoRA that does not work: `python scripts/lora_doctor.py runs/my-lora`. It only looks."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from trainer.errors import TrainerError
from trainer.lora import doctor


def main() -> int:
    """Parse the command line and do it; 1 if an answer is no or a fault is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/my-lora")
    parser.add_argument("--lora", type=Path, help="its file, if it is not beside that folder")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    try:
        found = doctor.read(options.run, options.lora)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    answers, findings = doctor.answers(found), doctor.findings(found)
    if options.json:
        value = {"answers": [asdict(it) for it in answers], "findings": [asdict(it) for it in findings]}
        print(json.dumps(value, indent=2, allow_nan=False))
    else:
        print(doctor.text(found))
    return int(any(it.verdict == "no" for it in answers) or any(it.fault for it in findings))


if __name__ == "__main__":
    sys.exit(main())
