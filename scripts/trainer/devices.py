"""Which device, number type and how much memory a job computes with."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from filelock import FileLock, Timeout

from trainer.errors import TrainerError

# On a CPU, torch and oneDNN keep a kernel for each of the last 1024 shapes they have met: gigabytes where lengths
# change with every batch, and no shape comes back. They read these when they make the first.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")

GIB = 1 << 30
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Of the memory that is free, what a job takes when it is not told how much.
_SHARE_OF_FREE = 0.9
# A batch needs room in proportion to its tokens; this many of them a GiB of the budget.
_TOKENS_PER_GIB = 1024

_claims: dict[str, FileLock] = {}


@dataclass(frozen=True)
class Budget:
    """Bytes that a job may use: of the device (on a CPU the same as `ram`) and of main memory."""

    device: int
    ram: int


def pick(setting: str) -> torch.device:
    """The device a setting means; `auto` is the GPU with the most free memory that no other job has, else the CPU.

    A GPU that `auto` picked is held until the process ends, so that jobs of one machine spread over its GPUs. Where
    all are taken, the one with the most free memory is shared.

    Raises:
        TrainerError: the device does not exist here.
    """
    count = torch.cuda.device_count()
    if setting == "auto":
        free = {index: torch.cuda.mem_get_info(index)[0] for index in range(count)}
        by_free = sorted(free, key=lambda index: (-free[index], index))
        for index in by_free:
            if _claim(str(torch.cuda.get_device_properties(index).uuid)):
                return torch.device("cuda", index)
        return torch.device("cuda", by_free[0]) if by_free else torch.device("cpu")
    try:
        device = torch.device(setting)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise TrainerError(f"device {setting!r} is unknown: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise TrainerError(f"device {setting!r} is not here ({count} CUDA devices found): use auto or cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _claim(name: str) -> bool:
    if name in _claims:
        return True
    lock = FileLock(Path(tempfile.gettempdir()) / f"gguf-trainer-{name}.lock", mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError:
        return True  # a folder that locks cannot be made in: no worse than without
    _claims[name] = lock
    return True


def dtype(setting: str, device: torch.device) -> torch.dtype:
    """The number type a setting means; `auto` is bf16 where the hardware multiplies in it, else f32."""
    if setting != "auto":
        return DTYPES[setting]
    return torch.bfloat16 if multiplies_bf16(device) else torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 is at least as fast as f32: GPUs from compute capability 8, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        # is_bf16_supported() also counts emulation, hence the capability.
        return torch.cuda.get_device_capability(device)[0] >= 8
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def budget(device: torch.device, gpu_gib: float, ram_gib: float, granted: int) -> Budget:
    """The memory a job may use.

    Args:
        device: where it computes.
        gpu_gib: GiB of GPU memory; 0: what is free.
        ram_gib: GiB of main memory; 0: what is free, at most `granted`.
        granted: bytes of main memory that were asked of the scheduler.
    """
    ram = int(ram_gib * GIB) if ram_gib else int(min(_SHARE_OF_FREE * free_ram(), granted))
    if device.type == "cpu":
        return Budget(ram, ram)
    free, total = torch.cuda.mem_get_info(device)
    gpu = int(gpu_gib * GIB) if gpu_gib else int(_SHARE_OF_FREE * free)
    torch.cuda.set_per_process_memory_fraction(min(1.0, gpu / total), device)
    return Budget(gpu, ram)


def batch_tokens(device: torch.device, budget: Budget) -> int:
    """Tokens a batch, padding included, where the settings leave it open."""
    if device.type == "cpu":
        return 2048  # more do not make it faster
    return max(2048, min(65536, _TOKENS_PER_GIB * (budget.device // GIB)))


def free_ram() -> int:
    """Free bytes of the machine, or of the control group (container, batch job) that this process is in."""
    free = psutil.virtual_memory().available
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit = int((folder / "memory.max").read_text())  # "max" is no number
        # Not memory.current, which counts cached files too.
        used = int(next(line for line in (folder / "memory.stat").read_text().splitlines() if line[:5] == "anon ")[5:])
        return min(free, limit - used)
    except (OSError, ValueError, StopIteration):
        return free
