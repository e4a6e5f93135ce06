"""Print what adapter packs take on some machines, or on yours: `python scripts/estimate.py --tflops 20 --disk 1.5`."""

import argparse
from pathlib import Path

import yaml
from trainer import config, packs
from trainer.config import Settings
from trainer.estimates import Machine, estimate

ROOT = Path(__file__).resolve().parents[1]
# The first was measured, with benchmarks/precompute.py. A GPU's rate is 40 % of the dense bf16 one its maker states.
MACHINES = [
    Machine("2 CPU cores", 0.6, 1),
    Machine("RTX 3060", 10, 2),
    Machine("RTX 4090", 66, 3),
    Machine("H200", 390, 5),
]


def of_pack(name: str) -> Settings:
    """A pack's settings as it ships them."""
    return config.load(yaml.safe_load((ROOT / "packs" / name / "pack.yaml").read_text(encoding="utf-8")))


def table(machines: list[Machine]) -> list[str]:
    """Lines of a Markdown table, a row a pack."""
    head = ["pack", "GPU memory: precompute, training", "disk", *(f"{machine.name}" for machine in machines)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    # The demo is measured, and too small for these rates.
    for name in (name for name in packs.names() if name != "demo" and "adapters" in packs.get(name).kinds):
        made = [estimate(of_pack(name), machine) for machine in machines]
        memory = f"{_gb(made[0].streamed)} ({_gb(made[0].resident)} not streamed), {_gb(made[0].training.gpu)}"
        times = [f"{_time(it.precompute_hours)} + {_time(it.training_hours)}" for it in made]
        lines.append(f"| {' | '.join([name, memory, _gb(made[0].disk), *times])} |")
    return lines


def _gb(value: float) -> str:
    return f"{value:.2g} GB" if value < 10 else f"{value:.0f} GB"


def _time(hours: float) -> str:
    if hours < 1 / 60:
        return f"{max(1, round(hours * 3600))} s"
    if hours < 1:
        return f"{round(hours * 60)} min"
    return f"{hours:.2g} h" if hours < 48 else f"{hours / 24:.2g} days"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tflops", type=float, help="bf16 operations a second your machine reaches, in 10^12")
    parser.add_argument("--disk", type=float, default=2.0, help="GB a second your disk reads")
    options = parser.parse_args()
    print("\n".join(table([Machine("yours", options.tflops, options.disk)] if options.tflops else MACHINES)))
