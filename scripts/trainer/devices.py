"""Which device and number type a job computes with."""

import torch

from trainer.errors import TrainerError

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def pick(setting: str) -> torch.device:
    """The device a setting means; `auto` is the GPU with the most free memory, else the CPU.

    Raises:
        TrainerError: the device does not exist here.
    """
    count = torch.cuda.device_count()
    if setting == "auto":
        if not count:
            return torch.device("cpu")
        free = [torch.cuda.mem_get_info(index)[0] for index in range(count)]
        return torch.device("cuda", free.index(max(free)))
    try:
        device = torch.device(setting)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise TrainerError(f"device {setting!r} is unknown: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise TrainerError(f"device {setting!r} is not here ({count} CUDA devices found): use auto or cpu")
    return device


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
