"""A LoRA file put on a pipeline, whole or not at all.

diffusers takes a file of another family as nothing, or in part, without a word.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from trainer.errors import TrainerError
from trainer.lora import families, files, names
from trainer.lora.families import Family

NAME = "lora"  # of a loaded LoRA in a pipeline


def check(path: Path, family: Family, network: nn.Module) -> list[str]:
    """Refuse a LoRA that is not one of this network: by the family that the file names, and by its keys and sizes.

    Returns:
        The modules it is on, sorted.

    Raises:
        TrainerError: it is another family's, or does not fit.
    """
    stored, values = files.header(path)
    named = values.get(files.OURS + "family")
    if named is not None and named != family.name:
        title = families.get(named).title if named in families.names() else named
        raise TrainerError(
            f"{path} is a LoRA of {title}, not of {family.title}: nothing was loaded; give one of {family.title}, or a "
            f"model of {title}"
        )
    says = "" if named else "has no family in its metadata and "
    found: set[str] = set()
    for key, tensor in stored.items():
        parsed = names.parse(key, family, "diffusers")
        shape = _shape(network, parsed.module) if parsed else None
        if parsed is None or shape is None:
            raise TrainerError(
                f"{path} {says}has the key {key}, of no module of {family.title}{_whose(stored, family)}: nothing was "
                f"loaded; give a LoRA of {family.title}"
            )
        if parsed.holds == "alpha":
            continue
        out, into = shape
        found.add(parsed.module)
        size = tensor.shape[1:] if parsed.holds == "A" else tensor.shape[:1]
        if len(tensor.shape) != 2 or size != ((into,) if parsed.holds == "A" else (out,)):
            raise TrainerError(
                f"{path} {says}has {key} of {' x '.join(map(str, tensor.shape))} for a module of {out} x {into}: "
                f"nothing was loaded; give a LoRA of a {family.title} of this size"
            )
    if not found:
        raise TrainerError(f"{path} holds no LoRA: give another file")
    return sorted(found)


def _shape(network: nn.Module, module: str) -> tuple[int, int] | None:
    """Features out and in of a linear module, with a LoRA on it or not; None if there is none of that name."""
    try:
        found = network.get_submodule(module)
    except AttributeError:
        return None
    return (found.out_features, found.in_features) if isinstance(found, nn.Linear | LoraLayer) else None


def _whose(stored: dict[str, Any], family: Family) -> str:
    """Of which other families all keys would be."""
    others = [families.get(name) for name in families.names() if name != family.name]
    fitting = [it.title for it in others if all(names.parse(key, it, "diffusers") for key in stored)]
    return f" (all its keys are {' or '.join(fitting)}'s)" if fitting else ""


def load(pipeline: Any, path: Path, name: str = NAME) -> list[str]:
    """Put a LoRA on a pipeline of diffusers and see that each of its modules took it.

    Returns:
        The modules it is on, sorted.

    Raises:
        TrainerError: the pipeline is of no family here; the file is another family's or does not fit; or diffusers did
            not take all of it, in which case the pipeline is as it was.
    """
    family = families.of_pipeline(type(pipeline).__name__)
    if family is None:
        raise TrainerError(f"{type(pipeline).__name__} is of no family that LoRAs are trained for here")
    network = getattr(pipeline, family.part)
    modules = check(path, family, network)
    ours = files.OURS + "family" in files.header(path)[1]
    try:
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    except Exception as error:  # of diffusers', peft's or torch's, whatever it runs into
        if name in getattr(network, "peft_config", {}):
            pipeline.delete_adapters(name)
        raise TrainerError(f"diffusers did not load {path} ({str(error).splitlines()[0]}): export it again") from error
    took = {module: layer for module, layer in network.named_modules() if _has(layer, name)}
    wrong = sorted(set(modules) ^ took.keys())
    if not wrong and ours:
        wrong = sorted(module for module, layer in took.items() if layer.scaling[name] != 1)
    if wrong:
        pipeline.delete_adapters(name)
        raise TrainerError(
            f"diffusers did not put {path} on {len(wrong)} of {len(modules)} modules as it is, the first {wrong[0]}: "
            "nothing was loaded; export it again, or install the diffusers that this project names"
        )
    return modules


def _has(layer: nn.Module, name: str) -> bool:
    return isinstance(layer, LoraLayer) and name in layer.lora_A


def attach(network: nn.Module, weights: dict[str, torch.Tensor], alpha: float, name: str = NAME) -> None:
    """Put weights as they are trained on a network: `<module>.lora_A.weight`, `<module>.lora_B.weight`; f32.

    Raises:
        TrainerError: the network lacks a module of theirs.
    """
    modules = sorted({key.rpartition(".lora_")[0] for key in weights})
    rank = weights[f"{modules[0]}.lora_A.weight"].shape[0]
    network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules), adapter_name=name)
    result = set_peft_model_state_dict(network, weights, adapter_name=name)
    if result.unexpected_keys:
        raise TrainerError(f"the network has no module for {result.unexpected_keys[0]} of the LoRA's weights")
