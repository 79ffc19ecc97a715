"""What nets see: observations flat and normalised, images as they are; for a critic its own, its team's or the world's.

    own     an agent's own observation
    team    the observations of all agents of its team, side by side
    world   the world's own state; where it has none (or `given` is "joined") all observations, side by side

Agents that are not alive are zeros in a team's or the world's; their own observation is finite, or zeros where values of the
dead are learnt (`after_death`). `given` "agent" puts an agent's own observation beside that, for each agent: its id
follows in the net. Statistics are saved with the weights, and move when they are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos.base import Algorithm
from shoal.nets.encoders import VECTOR, Crowd, Encoder, Joined, counts_of, images_of, kinds_of, parts_of, vector_width
from shoal.nets.heads import Critic
from shoal.nets.layers import NetConfig
from shoal.nets.norm import CLIP, Running
from shoal.spec import EnvSpec, Frame, Group, UserError, View, tree_map, where_rows

Scope = Literal["own", "team", "world"]
Given = Literal["state", "joined", "agent"]


def scope_groups(spec: EnvSpec, groups: tuple[str, ...], scope: Scope) -> tuple[Group, ...]:
    """The groups whose observations a critic sees."""
    if scope == "own":
        return tuple(spec[g] for g in groups)
    return spec.groups if scope == "world" else spec.teams[spec[groups[0]].team]


def scope_width(spec: EnvSpec, groups: tuple[str, ...], scope: Scope, given: Given = "state") -> int:
    if scope == "own":
        return vector_width(spec[groups[0]].obs)
    if scope == "world" and spec.state is not None and given != "joined":
        return spec.state
    return sum(g.n * vector_width(g.obs) for g in scope_groups(spec, groups, scope))


def scope_input(
    spec: EnvSpec,
    groups: tuple[str, ...],
    scope: Scope,
    frame: Frame,
    prepare: Callable[[Any, Group], Tensor],
    given: Given = "state",
) -> Tensor:
    """What a central critic sees: [..., S]: the world's own state, or the joined observations, each as `prepare` makes it.
    Agents that are not alive are zeros."""
    if scope == "world" and frame.state is not None and given != "joined":
        return frame.state.float()
    parts = []
    for g in scope_groups(spec, groups, scope):
        view = frame[g.name]
        obs = prepare(view.obs, g)
        parts.append((torch.where(view.alive[..., None], obs, 0) if g.mortal else obs).flatten(-2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Observations(nn.Module):
    """The eyes of an algorithm's nets, actor and critic."""

    def __init__(
        self,
        owner: Algorithm,
        scope: Scope,
        given: Given,
        net: NetConfig,
        normalise: bool,
        make: Callable[..., Any] = Running,
        groups: tuple[str, ...] | None = None,  # whose eyes; none: all of its owner's
        blank: bool = False,  # the dead see zeros, so that values of theirs can be learnt
    ):
        super().__init__()
        self.blank = blank
        spec, groups = owner.spec, owner.groups if groups is None else groups
        self.spec, self.groups, self.scope, self.given, self.net = spec, groups, scope, given, net
        self.cat_groups = owner.cat_groups if groups == owner.groups else lambda part, agents_at: part(groups[0])
        self.agents = tuple(a for g in groups for a in spec[g].agents)
        self.central = scope != "own"
        if scope == "team" and len({spec[g].team for g in groups}) > 1:
            raise UserError(f"a critic that sees its team cannot serve {' and '.join(groups)}, which are of several teams.")
        self.around = scope_groups(spec, groups, scope)
        self.state_seen = scope == "world" and spec.state is not None and given != "joined"
        self.crowd = self.central and self.attends("critic")
        if not self.central and given != "state":
            raise UserError(
                f"--algo.critic-input {given} is for critics that see more than their own: take --algo.critic team or world."
            )
        if self.crowd and given != "state":
            raise UserError(
                f"--algo.critic-input {given} does not go with attention over agents, which takes their observations."
            )
        pictures = any(images_of(g.obs) for g in self.around) and not self.state_seen
        self.whole = self.central and (self.crowd or pictures)  # what the critic's encoder is to join
        if self.central and given == "agent" and (pictures or images_of(spec[groups[0]].obs)):
            raise UserError("--algo.critic-input agent does not take pictures: take state or joined.")
        seen = () if self.state_seen and not self.crowd else self.around
        looked_at = {*groups, *(g.name for g in seen)} if normalise else ()
        tied = self.attends("actor") or (not self.central and self.attends("critic"))
        if tied and normalise and not (isinstance(make, type) and issubclass(make, Running)):
            raise UserError("--net.attention takes no --algo.normaliser but one that derives from shoal.nets.norm.Running.")
        self.norms = nn.ModuleDict(
            {
                g.name: make(n, tied=ties(g)) if tied and g.layout else make(n)
                for g in spec.groups
                if g.name in looked_at and (n := vector_width(g.obs))
            }
        )
        state_size = spec.state if normalise and self.state_seen and not self.crowd else None
        self.state_norm = make(state_size) if state_size else None
        self._made: dict[tuple[str, int], tuple[Any, Any]] | None = None

    # --- nets that fit ---

    def attends(self, who: str) -> bool:
        """Whether the actor, or the critic, has attention; they are the same with a shared trunk."""
        return self.net.attention in (who, "both") or (self.net.trunk == "shared" and self.net.attention != "none")

    def encoder(self, generator: torch.Generator, who: Literal["actor", "critic"] = "actor") -> Encoder:
        """Of the agents' own observations."""
        return Encoder(self.spec[self.groups[0]], self.agents, self.net, generator, self.attends(who))

    @property
    def together(self) -> bool:
        """Whether the critic sees the same for all agents: [..., S]."""
        return self.central and not self.crowd and self.given != "agent"

    def critic_encoder(self, generator: torch.Generator) -> nn.Module | int:
        """Of what the critic sees, or its width where there is nothing to encode."""
        if not self.central:
            return self.encoder(generator, "critic")
        if self.crowd:
            return Crowd(self.around, self.groups, self.net, generator)
        if self.whole:
            return Joined(self.around, self.net, generator)
        width = scope_width(self.spec, self.groups, self.scope, self.given)
        return width + (vector_width(self.spec[self.groups[0]].obs) if self.given == "agent" else 0)

    def critic(self, generator: torch.Generator) -> Critic:
        return Critic(self.critic_encoder(generator), self.agents, self.net, generator, self.together)

    # --- seeing ---

    @contextmanager
    def once(self) -> Iterator[None]:
        """Meanwhile nothing is prepared twice: statistics and frames are to stay as they are."""
        self._made = {}
        try:
            yield
        finally:
            self._made = None

    def _once(self, what: str, of: Any, make: Callable[[], Any]) -> Any:
        if self._made is None:
            return make()
        key = what, id(of)
        if key not in self._made:
            self._made[key] = of, make()  # held, so that nothing else comes to have its id
        return self._made[key][1]

    def prepared(self, obs: Any, group: Group) -> Any:
        """[..., N, *O] -> float [..., N, width], normalised; images stay as they are, beside it."""
        return self._once("obs", obs, lambda: self._normalised(obs, group))

    def _normalised(self, obs: Any, group: Group) -> Any:
        vector, images = parts_of(obs, group)
        if vector is not None and group.name in self.norms:
            vector = cast(Running, self.norms[group.name]).normalise(vector, CLIP)
        if not images:
            return vector
        return images if vector is None else {VECTOR: vector, **images}

    def obs(self, frame: Frame, agents_at: int) -> Any:
        """What the actor sees: [..., N, *]."""
        return self._once("actor", frame, lambda: self.cat_groups(lambda g: self._prepared(frame[g], self.spec[g]), agents_at))

    def seen(self, frame: Frame, agents_at: int = 2) -> Any:
        """What the critic sees: [..., N, *], or [..., S] where it is central, or what its encoder joins."""
        return self._once("critic", frame, lambda: self._seen(frame, agents_at)) if self.central else self.obs(frame, agents_at)

    def _seen(self, frame: Frame, agents_at: int) -> Any:
        if self.whole:
            views = {g.name: (g, frame[g.name]) for g in self.around}
            return {k: (self._prepared(v, g), v.alive if g.mortal else None) for k, (g, v) in views.items()}
        seen = scope_input(self.spec, self.groups, self.scope, frame, self.prepared, self.given)
        seen = seen if self.state_norm is None else self.state_norm.normalise(seen, CLIP)
        if self.given != "agent":
            return seen
        own = self.obs(frame, agents_at)
        return torch.cat((seen[..., None, :].expand(*own.shape[:-1], -1), own), -1)

    def _prepared(self, view: View, group: Group) -> Any:
        """As `prepared`; what a world leaves for the dead to see may be anything: it stays finite, or `blank` makes zeros."""
        seen, alive = self.prepared(view.obs, group), view.alive[..., None]
        if not group.mortal:
            return seen
        if self.blank:
            return where_rows(view.alive, seen, tree_map(torch.zeros_like, seen))
        vector = seen if isinstance(seen, Tensor) else seen.get(VECTOR)
        if vector is None:
            return seen
        vector = vector.where(alive, vector.nan_to_num(0, 0, 0))
        return vector if isinstance(seen, Tensor) else {**seen, VECTOR: vector}

    def update(self, frame: Frame) -> None:
        """Let the statistics move by what was seen."""
        for g in self.spec.groups:
            if g.name in self.norms:
                view = frame[g.name]
                cast(Running, self.norms[g.name]).update(parts_of(view.obs, g)[0], view.alive if g.mortal else None)  # type: ignore[arg-type]
        if self.state_norm is not None and frame.state is not None:
            self.state_norm.update(frame.state)


def ties(group: Group) -> list[list[int]]:
    """Numbers of a flat observation that mean the same of different entities: their statistics are one, or their order would
    matter after all."""
    counts, out = counts_of(group), []
    for kind, at in kinds_of(group).items():
        if kind != "self":
            width = len(at) // counts[kind]
            out += [at[j::width] for j in range(width)]
    return out
