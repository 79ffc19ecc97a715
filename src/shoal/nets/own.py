"""Modules of the user's own: for the perceptrons (`--net.module`), and for the running normalisers (`--algo.normaliser`,
`--algo.state-normaliser`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.flags import arguments, refuse_unknown
from shoal.ids import own_object, split_arguments
from shoal.nets.config import NetConfig
from shoal.nets.norm import CLIP, Running
from shoal.spec import UserError


def own_module(
    net: NetConfig, width_in: int, width_out: int, agents: tuple[str, ...] | int, generator: torch.Generator
) -> nn.Module | None:
    """The user's own module, made as `Class(width_in, width_out, agents)`, to map [..., N, width_in] to [..., N, width_out].
    It draws its first weights from PyTorch's one generator, which is seeded from ours and put back."""
    if net.module is None:
        return None
    cls = own_object(net.module, "--net.module")
    n = agents if isinstance(agents, int) else len(agents)
    seed = int(torch.randint(2**31, (), generator=generator))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            module = cls(width_in, width_out, n)
            out = module.eval()(torch.zeros(2, n, width_in)) if isinstance(module, nn.Module) else None  # lazy layers draw here
    except Exception as e:  # whatever the user's class does
        raise UserError(
            f"--net.module is {net.module}, which could not be made with ({width_in}, {width_out}, {n}) and tried on an input "
            f"{[2, n, width_in]}: {type(e).__name__}: {e}."
        ) from e
    if not isinstance(module, nn.Module):
        raise UserError(f"--net.module is {net.module}, which makes no nn.Module but {type(module).__name__}.")
    shape = list(getattr(out, "shape", ()))
    if shape != [2, n, width_out]:
        raise UserError(
            f"--net.module {net.module} made {shape} of an input {[2, n, width_in]}: it must make {[2, n, width_out]}."
        )
    return module.train()


def normaliser(text: str | None, flag: str = "--algo.normaliser") -> partial[Any]:
    """The class to make normalisers of, with its arguments: `Running`, or the user's own, which is tried."""
    if text is None:
        return partial(Running)
    name, words = split_arguments(text)
    cls, given = own_object(name, flag), arguments(words, flag, text, "file.py:Class:clip=5,momentum=0.99")
    if given:
        refuse_unknown(given, cls, f"{flag} is {text}")
    try:
        make = partial(cls, **given)
        one, x = make(2), torch.ones(3, 2)
        one.update(x, torch.ones(3, dtype=torch.bool))
        shapes = {tuple(one.normalise(x, CLIP).shape), tuple(one.denormalise(x).shape)}
        make().update(torch.ones(3), None)
    except Exception as e:  # whatever the user's class does
        raise UserError(f"{flag} is {text}, which does not do what a normaliser does: {type(e).__name__}: {e}.") from e
    if not isinstance(one, nn.Module) or shapes != {(3, 2)}:
        raise UserError(f"{flag} is {text}: it must be an nn.Module that keeps shapes, so that it is saved with the weights.")
    return make
