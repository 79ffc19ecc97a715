"""What nets see: observations flat and normalised, images as they are; for a critic its own, its team's or the world's.

    own     an agent's own observation
    team    the observations of all agents of its team, side by side
    world   the world's own state; where it has none (or `critic_input` is "joined") all observations, side by side

Agents that are not alive are zeros in a team's or the world's; their own observation is finite, or zeros where values of the
dead are learnt (`after_death`). `critic_input` "agent" puts an agent's own observation beside that, for each agent: its id
follows in the net. Statistics are saved with the weights, and move when `update` is called.

What is a team's or the world's is called the state here: `normalise_state` and `state_normaliser` are for it alone. Where they
ask for the same as `normalise_obs` and `normaliser`, observations that are joined to a state are normalised once, for both.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos.base import Algorithm
from shoal.nets.config import NetConfig
from shoal.nets.encoders import AgentAttention, Encoder, JointEncoder, ties
from shoal.nets.heads import Critic
from shoal.nets.norm import CLIP, Running
from shoal.nets.own import normaliser
from shoal.nets.parts import VECTOR, images_of, parts_of, vector_width
from shoal.spec import EnvSpec, Frame, Group, UserError, View
from shoal.tree import cat_groups, tree_map, where_rows

Scope = Literal["own", "team", "world"]
STATE_SETTINGS = ("normalise_state", "state_normaliser")  # see `StateConfig`
CriticInput = Literal["state", "joined", "agent"]
Cache = dict[str, Any]  # group -> what was normalised already of a frame


def scope_groups(spec: EnvSpec, groups: tuple[str, ...], scope: Scope) -> tuple[Group, ...]:
    """The groups whose observations a critic sees."""
    if scope == "own":
        return tuple(spec[g] for g in groups)
    return spec.groups if scope == "world" else spec.teams[spec[groups[0]].team]


def scope_width(spec: EnvSpec, groups: tuple[str, ...], scope: Scope, critic_input: CriticInput = "state") -> int:
    if scope == "own":
        return vector_width(spec[groups[0]].obs)
    if scope == "world" and spec.state is not None and critic_input != "joined":
        return spec.state
    return sum(g.n * vector_width(g.obs) for g in scope_groups(spec, groups, scope))


class Observations(nn.Module):
    """What the actor and the critic of some groups see, and the statistics that it is normalised by."""

    def __init__(
        self,
        owner: Algorithm,
        scope: Scope = "own",
        critic_input: CriticInput = "state",
        groups: tuple[str, ...] | None = None,  # whose; none: all of its owner's
        net: NetConfig | None = None,  # none: the owner's
        zero_dead: bool | None = None,  # the dead see zeros, so that values of theirs can be learnt; none: where returns go on
    ):
        super().__init__()
        spec, groups, net = owner.spec, owner.groups if groups is None else groups, net or owner.net
        c = owner.config
        normalise, make = c.normalise_obs, normaliser(c.normaliser)
        normalise_state, own = (getattr(c, name, None) for name in STATE_SETTINGS)
        normalise_state = normalise if normalise_state is None else normalise_state
        state_make = make if own is None else normaliser(own, "--algo.state-normaliser")
        apart = normalise_state != normalise or own not in (None, c.normaliser)
        self.zero_dead = owner.returns_after_death if zero_dead is None else zero_dead
        self.spec, self.groups, self.scope, self.input_kind, self.net = spec, groups, scope, critic_input, net
        self.agents = tuple(a for g in groups for a in spec[g].agents)
        self.own = {g: spec[g] for g in groups}
        self.central = scope != "own"
        if scope == "team" and len({spec[g].team for g in groups}) > 1:
            raise UserError(f"a critic that sees its team cannot serve {' and '.join(groups)}, which are of several teams.")
        self.around = scope_groups(spec, groups, scope)
        self.sees_state = scope == "world" and spec.state is not None and critic_input != "joined"
        self.attends_agents = self.central and self.attends("critic")
        if not self.central and critic_input != "state":
            raise UserError(
                f"--algo.critic-input {critic_input} is for critics that see more than their own: take --algo.critic team or "
                "world."
            )
        if self.attends_agents and critic_input != "state":
            raise UserError(
                f"--algo.critic-input {critic_input} does not go with attention over agents, which takes their observations."
            )
        self.shares_trunk = net.trunk == "shared"
        pictures = any(images_of(g.obs) for g in self.around) and not self.sees_state
        self.joins = self.central and (self.attends_agents or pictures)  # the critic's encoder joins the observations itself
        own_pictures = images_of(spec[groups[0]].obs) and not self.shares_trunk  # of which the actor's net makes numbers
        if self.central and critic_input == "agent" and (pictures or own_pictures):
            instead = "--algo.critic own, or --net.trunk own" if self.shares_trunk else "state or joined"
            raise UserError(f"--algo.critic-input agent does not take pictures that a critic joins: take {instead}.")
        worlds_own = self.sees_state and not self.attends_agents
        joined = self.around if self.central and not worlds_own else ()
        normalised = {*groups, *(g.name for g in joined if not apart)} if normalise else ()
        tied = self.attends("actor") or (not self.central and self.attends("critic"))
        if tied and normalise and not (isinstance(make.func, type) and issubclass(make.func, Running)):
            raise UserError("--net.attention takes no --algo.normaliser but one that derives from shoal.nets.norm.Running.")
        self.norms = nn.ModuleDict(
            {
                g.name: make(n, tied=ties(g)) if tied and g.layout else make(n)
                for g in spec.groups
                if g.name in normalised and (n := vector_width(g.obs))
            }
        )
        state_size = spec.state if normalise_state and worlds_own else None
        self.state_norm = state_make(state_size) if state_size else None
        widths = {g.name: vector_width(g.obs) for g in joined if normalise_state}
        self.joined_norms = nn.ModuleDict({g: state_make(n) for g, n in widths.items() if n}) if joined and apart else None

    # --- nets that fit ---

    def attends(self, who: str) -> bool:
        """Whether the actor, or the critic, has attention; they are the same where they are one net that sees the same."""
        one = self.net.trunk == "shared" and not self.central
        return self.net.attention in (who, "both") or (one and self.net.attention != "none")

    def encoder(self, generator: torch.Generator, who: Literal["actor", "critic"] = "actor") -> Encoder:
        """Of the agents' own observations."""
        return Encoder(self.spec[self.groups[0]], self.agents, self.net, generator, self.attends(who))

    @property
    def shared_input(self) -> bool:
        """Whether the critic sees the same for all agents: [..., S]."""
        return self.central and not self.attends_agents and self.input_kind != "agent"

    def critic_encoder(self, generator: torch.Generator) -> nn.Module | int:
        """Of what the critic sees, or its width where there is nothing to encode."""
        if not self.central:
            return self.encoder(generator, "critic")
        if self.attends_agents:
            return AgentAttention(self.around, self.groups, self.net, generator)
        if self.joins:
            return JointEncoder(self.around, self.net, generator)
        width = self.state_width
        return width + (vector_width(self.spec[self.groups[0]].obs) if self.input_kind == "agent" else 0)

    @property
    def state_width(self) -> int:
        """S, how many numbers a critic sees of its team or world."""
        return scope_width(self.spec, self.groups, self.scope, self.input_kind)

    def critic(self, generator: torch.Generator) -> Critic:
        """A critic V of what it sees."""
        return Critic(self.critic_encoder(generator), self.agents, self.net, generator, self.shared_input)

    # --- inputs of nets; frames are [B, ...], or [T, B, ...] of a batch ---

    def actor_input(self, frame: Frame, cache: Cache | None = None) -> Any:
        """[..., N, *] every agent's own observation."""
        at = frame[self.groups[0]].active.dim() - 1
        return cat_groups(self.groups, lambda g: self._own(frame[g], self.own[g], cache), at)

    def critic_input(self, frame: Frame, cache: Cache | None = None) -> Any:
        """[..., N, *], or [..., S] where the critic is central, or what its encoder joins. A central critic that shares the
        actor's trunk has both of the first, in a pair."""
        if not self.central:
            return self.actor_input(frame, cache)
        if self.joins:
            views = [(g, frame[g.name]) for g in self.around]
            return {g.name: (self._own(view, g, cache, True), view.alive if g.mortal else None) for g, view in views}
        state = self._state(frame.state) if self.sees_state and frame.state is not None else self._joined(frame, cache)
        if self.input_kind != "agent":
            return state
        own = self.actor_input(frame, cache)
        return (own, state) if self.shares_trunk else self._beside(state, own)

    def _state(self, state: Tensor) -> Tensor:
        """[..., S] the world's own."""
        return state.float() if self.state_norm is None else self.state_norm.normalise(state.float(), CLIP)

    def _beside(self, state: Tensor, own: Tensor) -> Tensor:
        return torch.cat((state[..., None, :].expand(*own.shape[:-1], -1), own), -1)

    def _joined(self, frame: Frame, cache: Cache | None) -> Tensor:
        """[..., S] the observations of all agents in scope, side by side; zeros where an agent is not alive."""
        parts = []
        for g in self.around:
            obs = self._normalised(frame[g.name], g, cache, True)
            parts.append((torch.where(frame[g.name].alive[..., None], obs, 0) if g.mortal else obs).flatten(-2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _own(self, view: View, group: Group, cache: Cache | None, joined: bool = False) -> Any:
        """A group's normalised observations."""
        obs = self._normalised(view, group, cache, joined)
        return self._without_dead(obs, view) if group.mortal else obs

    def _without_dead(self, obs: Any, view: View) -> Any:
        """What a world leaves for the dead to see may be anything: it is made finite, or zeros."""
        if self.zero_dead:
            return where_rows(view.alive, obs, tree_map(torch.zeros_like, obs))
        vector = obs if isinstance(obs, Tensor) else obs.get(VECTOR)
        if vector is None:
            return obs
        vector = vector.where(view.alive[..., None], vector.nan_to_num(0, 0, 0))
        return vector if isinstance(obs, Tensor) else {**obs, VECTOR: vector}

    def _normalised(self, view: View, group: Group, cache: Cache | None, joined: bool = False) -> Any:
        """[..., N, *O] -> float [..., N, width], normalised; images stay as they are, beside it. `joined`: of a state."""
        norms = self.norms
        if joined and self.joined_norms is not None:
            norms, cache = self.joined_norms, None
        if cache is not None and group.name in cache:
            return cache[group.name]
        vector, images = parts_of(view.obs, group)
        if vector is not None and group.name in norms:
            vector = cast(Running, norms[group.name]).normalise(vector, CLIP)
        out = vector if not images else images if vector is None else {VECTOR: vector, **images}
        if cache is not None:
            cache[group.name] = out
        return out

    def update(self, frame: Frame, filled: Tensor | None = None) -> None:
        """Let the statistics move by what was seen; `filled` [T, B]: the steps that count, none: all."""
        for norms in (self.norms, self.joined_norms or nn.ModuleDict()):
            for g in (g for g in self.spec.groups if g.name in norms):
                view = frame[g.name]
                seen = view.alive if g.mortal else None
                if filled is not None:
                    seen = view.alive & filled[..., None]
                cast(Running, norms[g.name]).update(parts_of(view.obs, g)[0], seen)  # type: ignore[arg-type]
        if self.state_norm is not None and frame.state is not None:
            self.state_norm.update(frame.state, filled)


def refuse_without_state(learner: Algorithm) -> None:
    """Refuse settings for a state where nobody sees one."""
    c, seen = learner.config, [m for m in learner.modules() if isinstance(m, Observations)]
    for name in STATE_SETTINGS:
        if getattr(c, name, None) is not None and not any(x.central for x in seen):
            raise UserError(
                f"--algo.{name.replace('_', '-')} is for critics that see more than their own: take --algo.critic team or "
                "world."
            )
