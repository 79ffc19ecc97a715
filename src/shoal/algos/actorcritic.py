"""What actor-critics with a replay share: nets, exploration, what critics are given, one step of each.

`algos/ddpg.py`, `algos/td3.py` and `algos/sac.py` are a Config, a page of documentation and four hooks: `sample_action`,
`next_action`, `next_value` and `actor_loss`. Everything is for discrete, multi-discrete and continuous actions alike: a critic
takes an action as a vector, [..., A], one-hot where it is a choice, zeros of agents that do not act. An instance plays one
group; what its central critic must know of the others, whoever plays them, it asks its peers (`target_actions`).

    features        what a critic makes of what it sees, [T, B, N, F], perhaps with memory (`algos/recurrence.py`)
    joint action    what it is given beside that: an agent's own action, or those of all agents in its scope, end to end

Critics of agents that are paid alike are one, [T, B, 1]; where pay differs each agent has its own, in one batched product.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.base import Acted, Seat, StateConfig
from shoal.algos.checks import bounded
from shoal.algos.observations import CriticInput, Observations, Scope
from shoal.algos.offpolicy import OffPolicy, ReplayConfig
from shoal.algos.recurrence import remember_output, unroll_critic
from shoal.algos.samples import Samples
from shoal.algos.target import Target
from shoal.nets.heads import Net
from shoal.nets.qnets import ActionCritic
from shoal.ops import losses, values
from shoal.ops.distributions import params_of
from shoal.ops.explore import random_action
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Frame, UserError
from shoal.tree import cat_groups, split_groups, tree_map

Metrics = dict[str, Tensor]
Actions = dict[str, Tensor]  # group -> actions as vectors [..., N, A], zeros of those who do not act
QValue = Callable[[Tensor], Tensor]  # of an action [T, B, N, A], by each critic [K, T, B, N]


class ActorCritic(OffPolicy, ABC):
    value_metric = "predictQ"

    @dataclass(frozen=True)
    class Config(StateConfig, ReplayConfig):
        rules: ClassVar[defaults.Rules] = {
            **ReplayConfig.rules,
            "random_steps": defaults.warm,
            "noise_keep": defaults.noise_keep,
        }

        critic: Scope = "own"  # what the critic sees: own observation and action, the team's or the world's
        critic_input: CriticInput = (
            "state"  # state: the world's, or else all observations; joined: all observations; agent: and its own
        )
        others: Literal["buffer", "policy"] = "buffer"  # what others do, in the actor's loss: as they did, or as they would now
        critics: int = 1  # of which the lowest counts as the next value
        delay: int = 1  # updates of the critics for each of the actor and of the targets
        random_steps: int | None = (
            None  # of uniformly random actions at the beginning; none: a twentieth of the run, at most 5,000
        )
        noise_keep: float | None = (
            None  # continuous actions: correlation of exploration from step to step; none: by the horizon
        )
        lr_critic: float | None = None  # learning rate of the critics; none: the same
        lr_critic_schedule: str | None = None  # as lr_schedule; none: the same

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"random_steps": (0, 1e30), "noise_keep": (0, 0.9999), "critics": (1, 100)}, ("delay", "lr_critic"))

    actor_metrics: ClassVar[tuple[str, ...]] = ("loss_actor", "grad_norm_actor")  # names of those of the actor's step
    critics_climbed: ClassVar[int | None] = None  # how many of the critics the actor climbs; none: all
    q_of_choices: ClassVar[bool] = False  # of discrete actions a critic gives Q of every choice, instead of being given one
    due: bool | None = None  # whether the actor moves in this update; none: nobody knows
    warmup: Tensor
    own: Tensor
    held: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c, spec, generator = self.config, self.spec, seat.generator
        if self.net.trunk == "shared":
            raise UserError(f"--net.trunk shared does not go with {type(self).__name__}, whose critics take actions as well.")
        if c.noise_keep and not isinstance(self.space, Box):
            kind = self.space.kind
            raise UserError(f"--algo.noise-keep is for continuous actions; those of {', '.join(self.groups)} are {kind}.")
        self.width = params_of(self.space)  # of an action as a vector
        self.q_of_choices = type(self).q_of_choices and not isinstance(self.space, Box)  # type: ignore[misc]
        self.observations = Observations(self, c.critic, c.critic_input)
        self.central = self.observations.central
        self.around = [g.name for g in self.observations.around] if self.central else list(self.groups)
        self.others = [g for g in self.around if g not in self.groups]
        self.needs_peers = bool(self.others)
        self.spaces = {g: spec[g].action for g in self.around}
        self.waits = {g: spec.turns or spec[g].mortal for g in self.around}  # whether somebody may not act
        apart = c.after_death == "own" and any(spec[g].mortal for g in self.groups)  # each has a value that ends with it
        self.as_one = self.observations.shared_input and spec.common and not self.q_of_choices and not apart  # one critic
        self.actor = self.make_actor(generator)
        self.critics = nn.ModuleList(self._critic(generator) for _ in range(c.critics))
        self.set_feed()
        self.register_buffer("warmup", torch.tensor(c.random_steps > 0))  # act at random
        self.register_buffer("held", torch.zeros(len(self.actor_metrics)))  # the actor's metrics, while it waits
        self.register_buffer("own", self._own_places(), persistent=False)
        rate, schedule = c.lr_critic or c.lr, c.lr_critic_schedule or c.lr_schedule
        self._rate = self.schedule("lr")
        self._critic_rate = self.schedule("lr_critic", rate, rate * c.lr_last, schedule)
        self.place(seat.device)
        self.actor_optimiser = self.make_optimiser([self.actor], c.lr)
        self.critic_optimiser = self.make_optimiser([self.critics], rate)
        self.target = Target(self.critics, self.critic_optimiser, c.target_every * c.delay, c.target_tau)

    def make_actor(self, generator: torch.Generator) -> Net:
        seen = self.observations
        return Net(seen.encoder(generator), self.width, seen.agents, self.net, generator, self.net.gain_actor)

    def _critic(self, generator: torch.Generator) -> ActionCritic:
        seen, net = self.observations, self.net
        encoder, agents = seen.critic_encoder(generator), seen.agents
        if self.as_one:
            agents, net = ("all",), dataclasses.replace(net, share="plain")
        elif self.central and not self.spec.common:  # agents that are paid differently have critics of their own
            net = dataclasses.replace(net, share="none")
        joint = sum(self.spec[g].n * params_of(self.spec[g].action) for g in self.around) if self.central else self.width
        joint = 0 if self.q_of_choices and not self.central else joint
        gain, out = (net.gain_actor, self.width) if self.q_of_choices else (net.gain_critic, 1)
        return ActionCritic(encoder, joint, out, agents, net, generator, gain, seen.shared_input)

    def _own_places(self) -> Tensor:
        """[N, W] where an agent's own action is in the joint action."""
        agents = [(g, i) for g in self.groups for i in range(self.spec[g].n)]
        places = [(g, i) for g in self.around for i in range(self.spec[g].n) for _ in range(params_of(self.spec[g].action))]
        return torch.tensor([[place == agent for place in places] for agent in agents])

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {"actor": self.actor, "critic": self.critics, "target_critic": self.target.module}

    # --- hooks ---

    @abstractmethod
    def sample_action(self, params: Tensor, legal: Tensor | None, noise: Tensor | None, explore: bool) -> Tensor:
        """The actor's output as an action for the world."""

    @abstractmethod
    def next_action(self, params: Tensor, legal: Tensor | None, noise: Tensor) -> tuple[Tensor, Any]:
        """The next action as the target takes it, [..., N, A], and whatever `next_value` wants to know of the policy."""

    @abstractmethod
    def next_value(self, q: Tensor, policy: Any, active: Tensor | None) -> Tensor:
        """[T, B, N] the value of the next frame, of the critics' lowest; `active`: who acts in it, none: all."""

    @abstractmethod
    def actor_loss(
        self, params: Tensor, legal: Tensor | None, noise: Tensor, q_value: QValue
    ) -> tuple[Tensor, Tensor, Metrics]:
        """What the actor descends beside -Q of its action, [T, B, N]; that Q; and metrics [T, B, N]."""

    def update_temperature(self, metrics: Metrics, mask: Tensor | None, keep: Tensor | None) -> None:
        """What else moves with the actor, by the metrics of `actor_loss`, of which it may take some out."""

    @property
    def next_actor(self) -> Net:
        """Whose next actions the target takes."""
        return self.actor

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        if self.recurrent:
            zero = self.actor.zero_memory
            whole = {"actor": zero(rows, device), "critic": {str(k): zero(rows, device) for k in range(len(self.critics))}}
        if self.config.noise_keep:
            whole["noise"] = torch.zeros(rows, self.n, self.width, device=device)
        return split_groups(self.spec, self.groups, whole, 1)

    def target_act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, target: bool) -> Acted:
        return self.act(frame, memory, noise, False, self.next_actor if target and self.learns else None)

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool, by: Net | None = None
    ) -> Acted:
        """As everywhere; `by`: another net than the actor."""
        actor, explore = by or self.actor, explore and self.learns
        at = frame[self.groups[0]].active.dim() - 1
        cat, split = partial(cat_groups, self.groups, agents_at=at), partial(split_groups, self.spec, self.groups, agents_at=at)
        obs, legal = self.observations.actor_input(frame), cat(lambda g: frame[g].legal)
        u = None if noise is None else cat(noise.__getitem__)
        if self.recurrent or self.config.noise_keep:
            params, u, after = remember_output(self, actor, frame, cat, cat(memory.__getitem__), obs, u, explore)
            memory = split(after)
        else:
            params = actor(obs)[0]
        actions = self.sample_action(params, legal, u, explore)
        if u is not None and explore and self.config.random_steps:
            actions = random_action(self.space, u[..., : self.width], legal).where(self.warmup, actions)
        return Acted(split(actions), memory, {g: {} for g in self.groups})

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        return steps * rows * sum(n * width for n, width in self._noise_sizes())

    def _noise_sizes(self) -> list[tuple[int, int]]:
        """[N, K] of uniform numbers: for the actor's own loss, for its next actions, for the peers' next ones, and for those
        that they would take now."""
        own, peers = (self.n, self.width), [(self.spec[g].n, self.peers[g].noise) for g in self.others]
        return [own, own, *peers, *(peers if self.config.others == "policy" else ())]

    def set_schedules(self, now: Now) -> None:
        self.actor_optimiser.rate.fill_(self._rate(now))
        self.critic_optimiser.rate.fill_(self._critic_rate(now))
        self.warmup.fill_(now.step < self.config.random_steps)

    def update_statistics(self, batch: Batch) -> None:
        self.observations.update(batch.frame)
        if self.reward_norm is not None:
            self.update_reward_norm(batch)

    def update(self, samples: Samples) -> Metrics:
        noise = self._noise(samples)
        actions = {g: self._taken(samples, g) for g in self.around}
        with torch.no_grad():
            value_t = self._target_value(samples, noise, now=True) if self.spec.turns else None
            value_tp1 = self._target_value(samples, noise)
            target, mask = self.td_target(samples, value_tp1, value_t)
        metrics = self._update_critics(samples, actions, target, mask)
        update_actor = partial(self._update_actor, samples, actions, noise)
        metrics |= update_actor(None) if self.config.delay == 1 else self._when_due(update_actor)
        self.target.follow()
        rates = {"actor": self.actor_optimiser.rate, "critic": self.critic_optimiser.rate}
        return {**metrics, **{f"learning_rate_{k}": x.clone() for k, x in rates.items()}, "target_lag": self.target.lag()}

    def variant(self) -> int:
        if self.config.delay == 1 or self.target.updates.is_cuda:
            return 0
        self.due = bool((self.target.updates + 1) % self.config.delay == 0)
        return 1 + self.due

    def _when_due(self, update_actor: Callable[[Tensor | None], Metrics]) -> Metrics:
        """The actor's step, once in `delay` updates; in between its metrics stay what they were, and agents have none. Where
        `variant` has looked whether it is due, nothing is computed in vain."""
        due = (self.target.updates + 1) % self.config.delay == 0
        known, self.due = self.due, None
        apart = {}
        if known is not False:
            metrics = update_actor(due)
            self.held.copy_(torch.stack([metrics[k] for k in self.actor_metrics]).where(due, self.held))
            apart = {k: x.where(due, 0) for k, x in metrics.items() if k.endswith(losses.EACH)}
        return {**dict(zip(self.actor_metrics, self.held.clone().unbind(), strict=True)), **apart}

    def _target_value(self, samples: Samples, noise: dict[str, Any], now: bool = False) -> Tensor:
        """[T, B, N] the value of the next frames by the target critics; or of these (`now`), where agents wait for turns."""
        frame, legal = (samples.frame, samples.legal) if now else (samples.next_frame, samples.next_legal)
        params = self._actor_output(self.next_actor, samples, following=not now)
        action, policy = self.next_action(params, legal, noise["next"][self.burn_in :])
        actions = {g: self._masked(frame, g, x) for g, x in split_groups(self.spec, self.groups, action, 2).items()}
        for g in self.others:
            actions[g] = self._taken(samples, g, frame) if now else self._peer_action(samples, g, noise["peers_next"], False)
        # an agent's own next action counts, whoever is gone; but the dead do nothing where they are valued
        own = cat_groups(self.groups, actions.__getitem__, 2) if self.as_one or self.returns_after_death else action
        joint, targets = self._joint_action(own, actions, each=not self.as_one), cast(nn.ModuleList, self.target.module)
        q = [critic(self._features(critic, k, samples, not now), joint) for k, critic in enumerate(targets)]
        lowest = torch.stack(q).amin(0) if len(q) > 1 else q[0]
        active = self._active_in(frame, samples, now) if self.has_inactive else None
        return self.next_value(lowest if self.q_of_choices else lowest[..., 0], policy, active)

    def _active_in(self, frame: Frame, samples: Samples, now: bool) -> Tensor:
        active = samples.cat(lambda g: frame[g].active)
        return active if now else active & ~samples.cat(lambda g: samples.later.results[g].terminated)

    def _update_critics(self, samples: Samples, actions: Actions, target: Tensor, mask: Tensor | None) -> Metrics:
        joint = self._joint_action(cat_groups(self.groups, actions.__getitem__, 2), actions, each=False)
        each = []
        for k, critic in enumerate(self.critics):
            q = critic(self._features(critic, k, samples), joint)
            each.append(values.taken(q, samples.action, self.space) if self.q_of_choices else q.squeeze(-1))  # type: ignore[arg-type]
        q_t = self.learnt(_stacked(each), 1)  # [K, T, B, N]
        loss = losses.value_error(q_t, target.expand_as(q_t), self.config.huber).sum(0)
        loss = loss if samples.weight is None else loss * samples.weight[:, None]
        norm = self.critic_optimiser.descend(losses.masked_sum(loss, mask), losses.active_count(loss, mask))
        error, q_t = (target - q_t.detach()).abs().mean(0), q_t.detach().mean(0)
        return {
            **self.metric_means({"loss_critic": loss, "td_error": error, "predictQ": q_t}, mask),
            "grad_norm_critic": norm,
            **({"priority": values.td_priority(error, mask)} if self.config.prioritised else {}),
        }

    def _update_actor(self, samples: Samples, actions: Actions, noise: dict[str, Any], due: Tensor | None) -> Metrics:
        with torch.no_grad():
            critics = list(self.critics)[: self.critics_climbed]
            features = [self._features(critic, k, samples) for k, critic in enumerate(critics)]
            if self.config.others == "policy":
                actions = {**actions, **{g: self._peer_action(samples, g, noise["peers_now"], True) for g in self.others}}
        params, active = self._actor_output(self.actor, samples), samples.active
        q_value = partial(self._q_value if self.config.others == "buffer" else self._q_value_beside, samples, features, actions)
        with self.critic_optimiser.frozen():
            loss, q, metrics = self.actor_loss(params, samples.legal, noise["now"][self.burn_in :], q_value)
        loss, mask = self.learnt(loss - q), None if active is None else self.learnt(active)
        norm = self.actor_optimiser.descend(losses.masked_sum(loss, mask), losses.active_count(loss, mask), due)
        metrics = {k: self.learnt(x.detach()) for k, x in metrics.items()}
        self.update_temperature(metrics, mask, due)
        return {
            **self.metric_means({"loss_actor": loss, **metrics}, mask),
            "grad_norm_actor": norm,
        }

    def _q_value(self, samples: Samples, features: list[Tensor], actions: Actions, own: Tensor, each: bool = True) -> Tensor:
        """[K, T, B, N] what each critic, by its `features`, gives for an `own` action, while others do as in `actions`."""
        joint = self._joint_action(own, actions, each)
        q = _stacked([critic(x, joint) for critic, x in zip(self.critics, features, strict=False)])
        return q if self.q_of_choices else q.squeeze(-1)

    def _q_value_beside(self, samples: Samples, features: list[Tensor], actions: Actions, action: Tensor) -> Tensor:
        """The same for `others` "policy": the group's own other agents do as they would now. One critic is given all actions at
        once: the slope along all is that along each, the others' held, and each has its own share of it."""
        mine = {g: self._masked(samples.frame, g, x) for g, x in split_groups(self.spec, self.groups, action, 2).items()}
        own = cat_groups(self.groups, mine.__getitem__, 2) if self.as_one else action
        q = self._q_value(samples, features, {**actions, **tree_map(torch.detach, mine)}, own, each=not self.as_one)
        if not self.as_one:
            return q
        heads = self.n if samples.active is None else samples.active.sum(-1, keepdim=True).clamp(min=1)
        return q.detach() + (q - q.detach()) / heads

    def _noise(self, samples: Samples) -> dict[str, Any]:
        """Uniform numbers [T, B, N, K], see `_noise_sizes`."""
        assert samples.noise is not None
        lead, sizes = samples.batch.over.shape, self._noise_sizes()
        counts = [lead.numel() * n * width for n, width in sizes]
        parts = samples.noise[: sum(counts)].split(counts)
        now, following, *peers = (x.reshape(*lead, *size) for x, size in zip(parts, sizes, strict=True))
        peers_next, peers_now = (dict(zip(self.others, x, strict=False)) for x in (peers, peers[len(self.others) :]))
        return {"now": now, "next": following, "peers_next": peers_next, "peers_now": peers_now}

    # --- joint actions ---

    def _taken(self, samples: Samples, g: str, frame: Frame | None = None) -> Tensor:
        """What a group did."""
        return self._masked(frame or samples.frame, g, values.as_vector(samples.later.actions[g], self.spaces[g]))

    def _peer_action(self, samples: Samples, g: str, noise: dict[str, Tensor], now: bool) -> Tensor:
        """What a peer's group does in the next frames, or in these."""
        peer = self.peers[g]
        draws = {h: noise[h] for h in peer.groups if h in noise}
        action = peer.target_actions(samples.batch, g, draws, now)[self.burn_in :]
        return self._masked(samples.frame if now else samples.next_frame, g, action)

    def _masked(self, frame: Frame, g: str, action: Tensor) -> Tensor:
        """Actions as critics take them: zeros of those who do not act."""
        return action * frame[g].active[..., None] if self.waits[g] else action

    def _joint_action(self, own: Tensor, actions: Actions, each: bool) -> Tensor:
        """What critics are given: an agent's `own` action [..., N, A], and those of all others. `each`: for every agent apart,
        [..., N, W]; one critic for all can be given all at once, [..., 1, W]."""
        if not self.central:
            return own[..., :0] if self.q_of_choices else own
        rest = self._end_to_end(actions)
        if self.q_of_choices:
            return torch.where(self.own, 0, rest)
        mine = split_groups(self.spec, self.groups, own, own.dim() - 2)
        same = all(actions[g] is x for g, x in mine.items())
        every = rest if same else self._end_to_end({**actions, **mine})
        if self.as_one and not each:
            return every
        return every.expand(*every.shape[:-2], *self.own.shape) if same else every.where(self.own, rest)

    def _end_to_end(self, actions: Actions) -> Tensor:
        """[..., 1, W]"""
        parts = [actions[g].flatten(-2) for g in self.around]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1))[..., None, :]

    # --- nets over the samples ---

    def _actor_output(self, actor: Net, samples: Samples, following: bool = False) -> Tensor:
        """[T, B, N, ...] in these frames, or in the next."""
        if following and not self.recurrent:
            return samples.after(actor, samples.next_actor_input, None)[0]
        out, after = samples.unroll(actor, samples.actor_input, samples.memory["actor"] if self.recurrent else None)
        return samples.after(actor, samples.next_actor_input, after)[0] if following else out

    def _features(self, critic: Any, k: int, samples: Samples, following: bool = False) -> Tensor:
        """What a critic makes of what it sees, in these frames or in the next."""
        if self.recurrent:
            return unroll_critic(self, critic, k, samples, following)
        return critic.features(samples.next_critic_input if following else samples.critic_input)[0]

    def values(self, frame: Frame) -> Tensor:
        actions = {}
        for g in self.around:
            peer, rows = self.peers[g], frame[g].active.shape[1]
            chosen = peer.act(frame, peer.memory(rows, frame[g].active.device), None, False).actions[g]
            actions[g] = self._masked(frame, g, values.as_vector(chosen, self.spaces[g]))
        own = cat_groups(self.groups, actions.__getitem__, 2)
        critic: Any = self.critics[0]
        features = critic.features(self.observations.critic_input(frame))[0]
        q = critic(features, self._joint_action(own, actions, each=not self.as_one))
        q = values.expected(q, own, self.space) if self.q_of_choices else q[..., 0]  # type: ignore[arg-type]
        return q.expand(-1, -1, self.n)


def _stacked(xs: list[Tensor]) -> Tensor:
    return xs[0][None] if len(xs) == 1 else torch.stack(xs)  # of one without a copy
