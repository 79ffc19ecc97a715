"""Nets in files of their own (`--save.nets`), for plain PyTorch: docs/runs.md says what is in one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.algos.base import Algorithm
from shoal.algos.observations import Observations
from shoal.nets.layers import MLP


def net_files(learner: Algorithm) -> dict[str, dict[str, Any]]:
    """What is in each file, by its name: `<group>.<net>`, or where agents share nothing `<group>.<i>.<net>`."""
    spec, groups, normaliser = learner.spec, learner.groups, _state(normalisers(learner))
    files: dict[str, dict[str, Any]] = {}

    def add(file: str, agents: list[str], state: dict[str, Any]) -> None:
        files[file] = {"agents": agents, "net": _state(state), "normaliser": normaliser}

    for name, net in learner.nets.items():
        by_group = isinstance(net, nn.ModuleDict) and tuple(net) == groups
        separate = apart(net) or (by_group and learner.net.share == "none" and learner.n > 1)
        if not separate or learner.net.module is not None:  # nobody knows what of a user's module is whose
            add(f"{'+'.join(groups)}.{name}", [a for g in groups for a in spec[g].agents], net.state_dict())
            continue
        parts = {(g,): net[g] for g in groups} if by_group else {groups: net}  # type: ignore[index]
        for which, part in parts.items():
            agents = [(f"{g}.{i}", a) for g in which for i, a in enumerate(spec[g].agents)]
            for k, (place, agent) in enumerate(agents):
                add(f"{place}.{name}", [agent], of_agent(part, k))
    return files


def apart(net: nn.Module) -> bool:
    """Whether agents have weights of their own in it."""
    return any(isinstance(m, MLP) and m.apart for m in net.modules())


def of_agent(net: nn.Module, i: int) -> dict[str, Any]:
    """The state of a net as if it had been made for its i-th agent alone; what agents share is in it whole."""
    state = dict(net.state_dict())
    for path, m in net.named_modules():
        own = m.of_agent(i) if hasattr(m, "of_agent") else {}
        state.update({f"{path}.{k}" if path else k: x for k, x in own.items()})
    return state


def normalisers(learner: Algorithm) -> dict[str, Any]:
    """What a learner's nets are fed through, and their values, as a checkpoint names it."""
    paths = [path for path, m in learner.named_modules() if isinstance(m, Observations) or path == "value_norm"]
    return {k: x for k, x in learner.state_dict().items() if k.startswith(tuple(f"{path}." for path in paths))}


def _state(state: dict[str, Any]) -> dict[str, Any]:
    """On the CPU, each in memory of its own: a file holds itself, and not all that it shares memory with."""
    return {k: x.detach().cpu().clone() if isinstance(x, Tensor) else x for k, x in state.items()}
