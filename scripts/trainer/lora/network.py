"""The network that is trained: a frozen base with a LoRA on it, in as little memory as the settings ask for."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec

import torch
from torch import nn

from trainer.config import Lora
from trainer.errors import TrainerError
from trainer.job import log
from trainer.lora import bases, draws
from trainer.lora.families import Family
from trainer.lora.models.base import Model

ADAPTER = "default"  # peft's name of the LoRA
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "nf4": torch.bfloat16}


def precision(model: Model, options: Lora, device: torch.device) -> str:
    """The numbers that the base is kept in on a device: f32, bf16, f16 or nf4.

    What `auto` comes to depends on all memory of the device, not on what is free now: the same run goes on with the
    same numbers.

    Raises:
        TrainerError: the device or the settings cannot have what is asked for.
    """
    on_gpu = device.type == "cuda"
    found = bases.precision(
        options.base_precision,
        model.family,
        torch.cuda.get_device_capability(device) if on_gpu else None,
        bases.is_four_bits(model.folder, model.family),
        torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
        0 if options.offload else 2 * count_parameters(model),
    )
    if found == "nf4":
        if not on_gpu:
            raise TrainerError(f"numbers of 4 bits (nf4) are for NVIDIA GPUs, and this is {device}: use a dense base")
        if options.offload:
            raise TrainerError("lora.offload is for dense bases, and this one is kept in 4 bits: set it to false")
        if not find_spec("bitsandbytes"):
            raise TrainerError(
                "lora.base_precision nf4 takes the package bitsandbytes: `pip install bitsandbytes`, or set it to bf16"
            )
    return found


def count_parameters(model: Model) -> int:
    """Of the network, by its config; nothing is loaded."""
    import diffusers

    with torch.device("meta"):
        network = getattr(diffusers, model.family.network).from_config(model.config(model.family.part))
    return sum(it.numel() for it in network.parameters())


def load(model: Model, options: Lora, numbers: str, device: torch.device, seed: int) -> nn.Module:
    """The network of a model with a LoRA as the settings say; only its parameters require a gradient, f32.

    Args:
        model: the base.
        options: rank, alpha, dropout, targets, checkpointing and offload are read.
        numbers: of the base, as `precision` gives them.
        device: where it computes.
        seed: of the initial weights, which depend on nothing else.

    Raises:
        TrainerError: the base cannot be loaded, or has no module that is asked for.
    """
    network = model.network(DTYPES[numbers], torch.device("cpu") if options.offload else device, _quantization(numbers))
    attach(network, targets(network, model.family, options.targets), options, seed)
    if options.checkpointing:
        network.enable_gradient_checkpointing()
    if options.offload:
        offload(network, device)
    return network


def _quantization(numbers: str) -> object | None:
    if numbers != "nf4":
        return None
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def targets(network: nn.Module, family: Family, wanted: Sequence[str]) -> list[str]:
    """Names of the modules that get a LoRA, sorted.

    Args:
        network: of the family.
        family: its own modules are meant by `attn`, and with those of its MLPs by `attn-mlp`.
        wanted: these words, names of modules or ends of names, and patterns with * or ?; none: `attn`.

    Raises:
        TrainerError: there is no such module; which there are.
    """
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    presets = {"attn": family.targets, "attn-mlp": family.targets + family.mlp}
    found: set[str] = set()
    missing = []
    for word in wanted or ["attn"]:
        if word in presets:
            matches = {name for name in names if name.endswith(tuple(f".{end}" for end in presets[word]))}
        elif any(sign in word for sign in "*?["):
            matches = {name for name in names if fnmatchcase(name, word)}
        else:
            matches = {name for name in names if name == word or name.endswith(f".{word}")}
        found |= matches
        if not matches:
            missing.append(word)
    if missing:
        ends = {name.split(".", first)[-1] for name in names for first in range(name.count(".") + 1)}
        known = sorted(it for it in ends if not it[0].isdigit())
        near = {it: get_close_matches(it, known, n=3) for it in missing}
        words = [f"{it!r}" + (f" (near are {', '.join(names)})" if names else "") for it, names in near.items()]
        raise TrainerError(f"lora.targets: no linear layer of the {family.title} base matches {', '.join(words)}")
    return sorted(found)


def attach(network: nn.Module, names: Sequence[str], options: Lora, seed: int) -> None:
    """Put a LoRA on the modules with these names, f32: down is normal with a deviation of 1 / rank, up is zero."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    network.requires_grad_(False)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(names),
        init_lora_weights="gaussian",
    )
    network.add_adapter(config, ADAPTER)
    cast_training_params(network, torch.float32)
    with torch.no_grad():
        for name in names:
            down = network.get_submodule(f"{name}.lora_A.{ADAPTER}").weight
            drawn = draws.at(seed, f"lora {name}", 0).standard_normal(tuple(down.shape), dtype="float32")
            down.copy_(torch.from_numpy(drawn) / options.rank)


def parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA's, by their names in files: `<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]."""
    found = {name: it for name, it in network.named_parameters() if it.requires_grad}
    return {name.replace(f".{ADAPTER}.", "."): it for name, it in found.items()}


def use_compiled(network: nn.Module, wanted: bool) -> None:
    """Have torch make kernels for the blocks, or no longer. Names of parameters stay the same."""
    if wanted:
        network.compile_repeated_blocks(dynamic=True)
    else:
        for block in blocks(network):
            block._compiled_call_impl = None


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks that most of the network consists of."""
    return (module for module in network.modules() if type(module).__name__ in network._repeated_blocks)


def offload(network: nn.Module, device: torch.device) -> None:
    """Keep the frozen weights of the blocks in main memory: each comes to the device when it is computed with.

    A weight is on the device as long as autograd needs it: with checkpointing, while its block is computed. Everything
    else of the network, and the LoRA, goes to the device for good.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    waiting = {module for block in blocks(network) for module in block.modules()}
    for module in network.modules():
        own = dict(module.named_parameters(recurse=False))
        frozen = {name: it.data for name, it in own.items() if not it.requires_grad}
        if module in waiting and frozen and len(frozen) == len(own):
            held = {name: it.pin_memory() if device.type == "cuda" else it for name, it in frozen.items()}
            add_hook_to_module(module, AlignDevicesHook(device, offload=True, weights_map=held))
        else:
            _move(module, device)
    log.info("lora.offload: the blocks of the base wait in main memory")


def _move(module: nn.Module, device: torch.device) -> None:
    """The module's own tensors, not those of modules inside."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))
