"""A policy that learnt a group, and plays some of its agents where they are in other groups (`--regroup`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Acted, Algorithm, Seat
from shoal.algos.samples import Samples
from shoal.envs.regroup import Regrouping, taken
from shoal.spec import EnvSpec, Frame, UserError
from shoal.tree import tree_map


class RegroupedPolicy(Algorithm):
    """Plays one group of `spec` by what it would do in the group that it learnt: it is shown that group whole, and what it does
    with the agents of other groups is left out."""

    learns = False

    def __init__(self, policy: Algorithm, spec: EnvSpec, group: str):
        (self.theirs,), nobody = policy.groups, torch.Generator()
        super().__init__(Seat(spec, (group,), policy.config, policy.net, nobody))
        self.policy, self.group, self.id = policy, group, policy.id
        self.noise, self.greedy = policy.noise, policy.greedy  # type: ignore[misc]
        self.regrouping = Regrouping(spec, policy.spec)
        self.places = self.regrouping.back[group]  # of its agents in the group that was learnt

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        return {self.group: taken(self.policy.memory(rows, device), self.places)}

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        seen = Frame({self.theirs: self.regrouping.view(frame.views, self.theirs)}, frame.state)
        active, draws = seen[self.theirs].active, None
        remembered = self._among(self.policy.memory(len(active), active.device)[self.theirs], memory[self.group])
        if noise is not None:
            draws = {self.theirs: self._among(active.new_zeros(*active.shape, self.noise).float() + 0.5, noise[self.group])}
        acted = self.policy.act(seen, {self.theirs: remembered}, draws, explore)
        done, after = (taken(part, self.places) for part in acted[:2])
        return Acted({self.group: done}, {self.group: after}, {self.group: {}})

    def _among(self, everybody: Any, mine: Any) -> Any:
        """A tree of all agents of the group that was learnt, with those that play here in their places."""

        def put(x: Tensor, y: Tensor) -> Tensor:
            x, at = x.clone(), 0
            for _, start, stop in self.places:
                x[:, start:stop] = y[:, at : at + stop - start]
                at += stop - start
            return x

        return tree_map(put, everybody, mine)

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}


def learnt_group(theirs: EnvSpec, spec: EnvSpec, group: str, run: str) -> str | None:
    """The group of a run's in which it learnt these agents, where the world has other groups now; none: it has not, or it is
    another world."""
    of = {a: g for g in theirs.groups for a in g.agents}
    if set(of) != {a for g in spec.groups for a in g.agents}:
        return None
    if [(g.name, g.agents) for g in theirs.groups] == [(g.name, g.agents) for g in spec.groups]:
        return None
    mine, found = spec[group], list(dict.fromkeys(of[a].name for a in spec[group].agents))
    if any((g.obs, g.action) != (mine.obs, mine.action) for g in (theirs[name] for name in found)):
        return None
    if len(found) > 1:
        names = " and ".join(found)
        raise UserError(
            f"the run {run} learnt the agents of {group!r} in the groups {names}: --regroup may part them, not join."
        )
    return found[0]
