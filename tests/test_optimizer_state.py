"""The state of optimizers: what was saved of one makes another of the same kind go on to the same bytes."""

import json

import pytest
import torch
from trainer import optimizer_state


class Coarse(torch.optim.Optimizer):
    """State like that of 8-bit optimizers and of those that find their own rate: bytes, numbers, values of groups."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "d": 1e-3, "k": 0, "found": None, "limit": float("inf")})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for it in (it for it in group["params"] if it.grad is not None):
                state = self.state[it]
                state["step"] = state.get("step", 0) + 1
                old = state.get("coarse", torch.zeros(it.shape, dtype=torch.uint8))
                state["coarse"] = (old + 100 * it.grad.abs()).to(torch.uint8)
                group["d"] *= 1 + 0.1 * float(state["coarse"].float().mean())
                it -= group["lr"] * group["d"] * state["coarse"] / state["step"] / group["k"]


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "coarse": lambda p: Coarse(p, lr=0.01),
}


def prodigy(parameters):
    return pytest.importorskip("prodigyopt").Prodigy(parameters, lr=1.0, weight_decay=0.01)


def eight_bits(parameters):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=0.01, min_8bit_size=1)


def parameters(values=None):
    shapes = {"a.weight": (64, 128), "b/odd": (3,), "never": (2,)}
    random = torch.Generator().manual_seed(1)
    given = values or {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {name: torch.nn.Parameter(it.clone()) for name, it in given.items()}


def go(optimizer, trained, first, end):
    for step in range(first, end):
        random = torch.Generator().manual_seed(step)
        for name, it in trained.items():
            it.grad = None if name == "never" else torch.randn(it.shape, generator=random)
        optimizer.step()


@pytest.mark.parametrize("make", [*KINDS.values(), prodigy, eight_bits], ids=[*KINDS, "prodigy", "8bit"])
def test_a_state_taken_up_again_ends_in_the_same_bytes(make):
    trained = parameters()
    optimizer = make(list(trained.values()))
    go(optimizer, trained, 0, 4)
    tensors, values = optimizer_state.pack(optimizer, trained)
    tensors = {name: it.clone() for name, it in tensors.items()}
    assert not any(name.startswith("optimizer.never") for name in tensors)
    again = parameters({name: it.detach() for name, it in trained.items()})
    other = make(list(again.values()))
    optimizer_state.unpack(other, again, tensors, json.loads(json.dumps(values, allow_nan=False)))
    for some, held in ((optimizer, trained), (other, again)):
        go(some, held, 4, 9)
    assert all(torch.equal(trained[name], again[name]) for name in trained)
    ends = [optimizer_state.pack(some, held) for some, held in ((optimizer, trained), (other, again))]
    assert ends[0][1] == ends[1][1]
    assert all(
        torch.equal(it, ends[1][0][name]) and it.dtype == ends[1][0][name].dtype for name, it in ends[0][0].items()
    )
