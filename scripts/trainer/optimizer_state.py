"""The state of any optimizer as tensors and numbers, so that training resumes to the byte."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoints import Tensors, part

Parameters = dict[str, nn.Parameter]


def pack(optimizer: Optimizer, parameters: Parameters) -> tuple[Tensors, dict[str, Any]]:
    """Tensors, as `optimizer.<parameter>/<name>`, and JSON-able values of parameters and, unless usual, of groups.

    Parameters that have never had a gradient have no state.
    """
    tensors, values = {}, {}
    for parameter_name, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter_name}/{name}"] = value
            else:
                values.setdefault(parameter_name, {})[name] = value
    usual = optimizer.defaults
    groups = [
        {name: it for name, it in group.items() if name != "params" and it != usual.get(name)}
        for group in optimizer.param_groups
    ]
    return tensors, {"state": values, "groups": groups}


def unpack(optimizer: Optimizer, parameters: Parameters, tensors: Tensors, values: dict[str, Any]) -> None:
    """Put the state that `pack` gave into an optimizer of the same parameters.

    Not by `load_state_dict`, which makes everything of the parameters' type: 8-bit states are bytes.
    """
    for key, tensor in part(tensors, "optimizer.").items():
        parameter_name, name = key.rsplit("/", 1)
        parameter = parameters[parameter_name]
        optimizer.state[parameter][name] = tensor.to(parameter.device)
    for parameter_name, state in values["state"].items():
        optimizer.state[parameters[parameter_name]].update(state)
    for group, stored in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update({name: tuple(it) if isinstance(it, list) else it for name, it in stored.items()})
