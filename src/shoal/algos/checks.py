"""What is checked before anything starts: settings within their bounds, and worlds that an algorithm can take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.nets.config import NetConfig
from shoal.spec import EnvSpec, UserError

if TYPE_CHECKING:
    from shoal.algos.base import Algorithm

MOST_COUNT = 10**12


def fits(cls: type[Algorithm], spec: EnvSpec, groups: Iterable[str]) -> None:
    """Refuse, in a sentence, a world that the algorithm cannot take."""
    name = cls.__name__
    for g in groups:
        kind = spec[g].action.kind
        if kind not in cls.takes:
            raise UserError(f"{name} takes {' and '.join(cls.takes)} actions; those of {g!r} are {kind}.")
        if spec[g].mortal and not cls.mortal:
            raise UserError(f"{name} cannot take agents that die or arrive late, as those of {g!r} do.")
    if spec.turns and not cls.turns:
        raise UserError(f"{name} cannot play turn-based worlds.")
    if cls.reward == "common" and not spec.common:
        raise UserError(f"{name} needs agents that are paid alike: ask for --reward team-mean or --reward team-sum.")


def trunk_fits(config: Any, net: NetConfig) -> None:
    """Refuse, in a sentence, what does not go with a trunk that actor and critic share (`--net.trunk shared`)."""
    central, own_rate = config.critic != "own", config.lr_critic not in (None, type(config).lr_critic)
    if central and config.critic_input != "agent":
        raise UserError(
            f"--net.trunk shared runs over an agent's own observation, which --algo.critic {config.critic} does not see apart "
            f"with --algo.critic-input {config.critic_input}: take --algo.critic-input agent, or --algo.critic own."
        )
    if config.critic_slices or own_rate or (net.critic_hidden is not None and not central):
        raise UserError(
            "--net.trunk shared is one net for actor and critic: it takes no --algo.critic-slices, no --algo.lr-critic and, "
            "with --algo.critic own, no --net.critic-hidden."
        )
    if central and net.memory == "none" and (net.module is not None or not net.hidden):
        raise UserError(
            "--net.trunk shared with a central critic shares hidden layers or a memory: take --net.hidden or --net.memory, and "
            "leave --net.module where there is no memory."
        )


def bounded(config: Any, bounds: Mapping[str, tuple[float, float]], positive: Iterable[str] = ()) -> None:
    """Refuse, in a sentence, settings that are out of bounds; those that are none, or that there are not, are let be."""
    for name, (low, high) in {**bounds, **dict.fromkeys(positive, (1e-30, 1e30))}.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > MOST_COUNT:
            raise UserError(f"--algo.{name.replace('_', '-')} is {value}: it must be at most {MOST_COUNT:g}.")
        if value is not None and not low <= value <= high:
            most = f"at least {low:g}" if high == 1e30 else f"between {low:g} and {high:g}"
            must = "more than zero" if low == 1e-30 else most
            raise UserError(f"--algo.{name.replace('_', '-')} is {value}: it must be {must}.")
