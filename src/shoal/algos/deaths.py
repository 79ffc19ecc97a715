"""Pay after death: where pay is common (`after_death` team), an agent's return goes on after its own death, until its team's
episode ends. What follows from that for the parts of `Samples`, here for one group each: [T, B, N].

The dead are out of policy losses, but their values are bootstrapped from, and so are learnt: of zeros and their ids. They have
one choice, the first, and earn the mean of what the living of their team are paid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.ops import losses
from shoal.ops.values import first_choice
from shoal.spec import Batch, Box, EnvSpec, Frame, UserError
from shoal.tree import where_rows

if TYPE_CHECKING:
    from shoal.algos.samples import Samples


def returns_after_death(spec: EnvSpec, groups: tuple[str, ...], after_death: str) -> bool:
    """Whether an agent's return goes on after its death, until its team's episode ends: where agents can die, teams are more
    than one, and their pay is common."""
    if after_death == "team" and not spec.common:
        raise UserError(
            "--algo.after-death team is for agents that are paid alike: ask for --reward team-mean or --reward team-sum."
        )
    crowd = any(sum(g.n for g in spec.teams[spec[x].team]) > 1 for x in groups)
    return after_death != "own" and spec.common and crowd and any(spec[g].mortal for g in groups)


def next_frame(samples: Samples) -> Frame:
    """The true next frames. Agents that were truncated with their team's episode are there, with their last observations, and
    the dead have one choice, the first."""
    batch = samples.later
    views = dict(batch.next.views)
    for g in samples.groups:
        then, last, space = batch.next[g], truncated(samples, g), samples.spec[g].action
        alive, legal = then.alive | last, None
        if not isinstance(space, Box):
            first = first_choice(space, alive.device)
            legal = alive[..., None] | first if then.legal is None else then.legal.where(alive[..., None], first)
        views[g] = replace(then, alive=alive, active=then.active | last, legal=legal)
    return Frame(views, batch.next.state)


def action(samples: Samples, group: str) -> Tensor:
    """The dead took their one choice."""
    taken = samples.later.actions[group]
    return where_rows(samples.frame[group].alive, taken, torch.zeros_like(taken))


def reward(samples: Samples, group: str) -> Tensor:
    """The dead earn the mean of what the living of their team are paid: a world may pay the living alone, or the dead something
    that is not theirs."""
    paid, alive = samples.later.learner_reward, of_team(samples, group, lambda g: samples.frame[g].alive)
    mean = losses.masked_mean(of_team(samples, group, paid.__getitem__), alive, (2,))
    return paid[group].where(samples.frame[group].alive, mean)


def valued(samples: Samples) -> Tensor:
    """Everybody's values are learnt while somebody of the team is there, of those who have not arrived yet as well."""

    def part(g: str) -> Tensor:
        alive = of_team(samples, g, lambda h: samples.frame[h].alive)
        return alive.any(-1, keepdim=True).expand_as(samples.frame[g].alive)

    mask = samples.cat(part)
    return mask if samples.filled is None else mask & samples.filled


def team_ends(samples: Samples, group: str) -> tuple[Tensor, Tensor]:
    """Whether nobody of a group's team goes on, and whether its episode is over or nobody is there any more."""
    batch = samples.later
    ended = ~of_team(samples, group, lambda g: goes_on(batch, g)).any(-1, keepdim=True)
    left = ~of_team(samples, group, lambda g: batch.next[g].alive).any(-1, keepdim=True)
    shape = batch.frame[group].alive.shape
    return ended.expand(shape), (batch.over[..., None] | left).expand(shape)


def next_turn(samples: Samples, group: str) -> Tensor:
    """Whose V(next) says something: those to move, and who was truncated with the team."""
    return samples.later.next[group].active | truncated(samples, group)


def truncated(samples: Samples, group: str) -> Tensor:
    """Who is gone because its team's episode was truncated: its return is bootstrapped from what it saw last."""
    batch = samples.later
    lived = batch.frame[group].alive & ~batch.next[group].alive
    return team_ends(samples, group)[1] & lived & ~batch.results[group].terminated


def of_team(samples: Samples, group: str, part: Callable[[str], Tensor]) -> Tensor:
    """Tensors of all groups of a group's team, whoever plays them, side by side: [T, B, all agents]."""
    parts = [part(g.name) for g in samples.spec.teams[samples.spec[group].team]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def goes_on(batch: Batch, group: str) -> Tensor:
    """Whose next frame may be worth something: whoever was or is there and did not terminate, and who was born again."""
    now, then = batch.frame[group], batch.next[group]
    return (now.alive | then.alive) & (~batch.results[group].terminated | then.start)
