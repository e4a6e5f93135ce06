"""Print what packs take on some machines, or on yours: `python scripts/estimate.py --tflops 20 --disk 1.5 --gpu 16`."""

import argparse
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from trainer import config, packs
from trainer.config import Settings
from trainer.estimates import Estimate, Machine, estimate
from trainer.lora import bases, families

ROOT = Path(__file__).resolve().parents[1]
# The first was measured, with benchmarks/precompute.py. A GPU's rate is 40 % of the dense bf16 one its maker states.
MACHINES = [
    Machine("2 CPU cores", 0.6, 1),
    Machine("RTX 3060", 10, 2, 12),
    Machine("RTX 4090", 66, 3, 24),
    Machine("H200", 390, 5, 141),
]
PICTURES = 20  # that a LoRA learns from in its table


def of_pack(name: str, **groups: dict[str, Any]) -> Settings:
    """A pack's settings as it ships them, with other groups."""
    return config.load(yaml.safe_load((ROOT / "packs" / name / "pack.yaml").read_text(encoding="utf-8")) | groups)


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


def lora_table(machines: list[Machine]) -> list[str]:
    """The same of LoRAs, in the numbers of the base that `auto` chooses; where these do not fit, offloaded."""
    machines = [machine for machine in machines if machine.gpu]
    head = ["pack", "GPU memory: precompute", "training in bf16", "in nf4", "offloaded", "disk"]
    head += [f"{machine.name}, {machine.gpu:g} GB" for machine in machines]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    with TemporaryDirectory() as folder:
        for number in range(PICTURES):
            Path(folder, f"{number}.png").touch()
        for name in (name for name in packs.names() if name != "lora_demo" and "LoRAs" in packs.get(name).kinds):
            made = partial(_of_lora, name, folder)
            ways = {
                "bf16": {"base_precision": "bf16"},
                "nf4": {"base_precision": "nf4"},
                "offload": {"base_precision": "bf16", "offload": True},
            }
            first = made(machines[0], ways["bf16"])
            memory = [_gb(made(machines[0], lora).training.gpu) for lora in ways.values()]
            times = []
            for machine in machines:
                way = _way(name, machine, {it: made(machine, lora).training.gpu for it, lora in ways.items()})
                times.append(f"{_time(made(machine, ways[way]).training_hours)} ({way})")
            lines.append(f"| {' | '.join([name, _gb(first.resident), *memory, _gb(first.disk), *times])} |")
    return lines


def _of_lora(name: str, folder: str, machine: Machine, lora: dict[str, Any]) -> Estimate:
    return estimate(of_pack(name, pictures={"folder": folder}, lora=lora), machine)


def _way(name: str, machine: Machine, needed: dict[str, float]) -> str:
    family = families.get(packs.get(name).family)
    way = bases.precision("auto", family, (8, 0), False, machine.gpu, family.gigabytes)
    return way if needed[way] < machine.gpu else "offload"


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
    parser.add_argument("--gpu", type=float, default=0.0, help="GB of memory of its GPU: LoRAs are told with one")
    options = parser.parse_args()
    chosen = [Machine("yours", options.tflops, options.disk, options.gpu)] if options.tflops else MACHINES
    print("\n".join(table(chosen)))
    if any(machine.gpu for machine in chosen):
        print("", *lora_table(chosen), sep="\n")
