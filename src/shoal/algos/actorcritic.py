"""What actor-critics with a replay share: nets, exploration's bookkeeping, what critics are told, one step of each.

`algos/ddpg.py`, `algos/td3.py` and `algos/sac.py` are a Config, a page of documentation and four hooks: `play`, `next_action`,
`next_value` and `improve`. Everything is for discrete, multi-discrete and continuous actions alike: a critic takes an action as
a vector, [..., A], one-hot where it is a choice. An instance plays one group; what its central critic must know of the others,
whoever plays them, it asks its peers (`target_actions`).

    features    what a critic sees, [T, B, N, F], perhaps remembered
    beside      the actions that it is told: an agent's own, or those of all agents in its scope, end to end, [T, B, N, W]

Critics of agents that are paid alike are one, [T, B, 1]; where pay differs each agent has its own, in one batched product.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos import recall
from shoal.algos.base import Algorithm, Optimiser, Target, bounded
from shoal.algos.observations import Given, Observations, Scope
from shoal.algos.recall import ReplayConfig
from shoal.nets.heads import ActionCritic, Net
from shoal.nets.layers import NetConfig
from shoal.nets.norm import Running, normaliser
from shoal.ops import losses, schedules, values
from shoal.ops.distributions import Choice, params_of
from shoal.ops.explore import correlated
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, EnvSpec, Frame, UserError, tree_map, where_rows

Told = Any  # what `next_action` keeps for `next_value`


def stacked(xs: list[Tensor]) -> Tensor:
    return xs[0][None] if len(xs) == 1 else torch.stack(xs)  # of one without a copy


class ActorCritic(Algorithm, ABC):
    @dataclass(frozen=True)
    class Config(ReplayConfig):
        critic: Scope = "own"  # what the critic sees: own observation and action, the team's or the world's
        critic_input: Given = "state"  # of the world: its state or else joined; joined observations; agent: state and own too
        others: Literal["buffer", "policy"] = "buffer"  # what others do, in the actor's loss: as they did, or as they would now
        critics: int = 1  # of which the lowest counts as the next value
        delay: int = 1  # updates of the critics for each of the actor and of the targets
        random_steps: int = 5_000  # environment steps of uniformly random actions at the beginning
        noise_keep: float = 0.0  # continuous actions: correlation of exploration with that of the step before
        target_every: int = 1  # updates between those of the targets
        target_tau: float = 0.01  # share by which they follow; 1: copied
        huber: float | None = None  # errors of the critic beyond this count linearly; none: squared errors
        lr: float = 1e-3  # learning rate
        lr_critic: float | None = None  # learning rate of the critics; none: the same
        lr_critic_schedule: str | None = None  # as lr_schedule; none: the same

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"random_steps": (0, 1e30), "noise_keep": (0, 0.9999), "critics": (1, 100)}, ("delay", "lr_critic"))

    held_names: ClassVar[tuple[str, ...]] = ("loss_actor", "grad_norm_actor")  # metrics of the actor's step
    heard: ClassVar[int | None] = None  # how many of the critics the actor climbs; none: all
    lists: ClassVar[bool] = False  # of choices the critic says what each is worth, instead of being told one
    due: bool | None = None  # whether the actor moves in this update; none: nobody knows
    warmup: Tensor
    own: Tensor
    held: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        groups: tuple[str, ...],
        config: Any,
        net: NetConfig,
        generator: torch.Generator,
        device: str | torch.device = "cpu",
    ):
        super().__init__(spec, groups, config, net, generator, device)
        c = config
        if net.trunk == "shared":
            raise UserError(f"--net.trunk shared does not go with {type(self).__name__}, whose critics take actions as well.")
        if c.noise_keep and not isinstance(self.space, Box):
            raise UserError(f"--algo.noise-keep is for continuous actions; those of {', '.join(groups)} are {self.space.kind}.")
        self.recurrent = net.memory != "none"
        self.chunk, self.burn_in = recall.lengths(self)
        self.feed = recall.feed(c, self.chunk, self.burn_in)
        self.width = params_of(self.space)  # of an action as a vector
        self.lists = type(self).lists and not isinstance(self.space, Box)  # type: ignore[misc]
        make = normaliser(c.normaliser)
        self.observations = Observations(
            self, c.critic, c.critic_input, net, c.normalise_obs, make, blank=self.returns_after_death
        )
        self.central = self.observations.central
        self.around = [g.name for g in self.observations.around] if self.central else list(groups)
        self.others = [g for g in self.around if g not in groups]
        apart = c.after_death == "own" and any(spec[g].mortal for g in groups)  # each has a value that ends with it
        self.as_one = self.observations.together and spec.common and not self.lists and not apart  # one critic judges for all
        self.actor = self.make_actor(generator)
        self.critics = nn.ModuleList(self._critic(generator) for _ in range(c.critics))
        self.reward_norm = Running() if c.normalise_reward else None
        self.register_buffer("warmup", torch.tensor(c.random_steps > 0))  # act at random
        self.register_buffer("held", torch.zeros(len(self.held_names)))  # the actor's metrics, while it waits
        self.register_buffer("own", self._own_places(), persistent=False)
        self._rate = schedules.make(c.lr_schedule, c.lr, c.lr * c.lr_last, "--algo.lr-schedule")
        first = c.lr_critic or c.lr
        schedule = c.lr_critic_schedule or c.lr_schedule
        self._critic_rate = schedules.make(schedule, first, first * c.lr_last, "--algo.lr-critic-schedule")
        self.to(device)
        self.actor_optimiser = Optimiser([self.actor], c.lr, c.weight_decay, c.grad_clip)
        self.critic_optimiser = Optimiser([self.critics], first, c.weight_decay, c.grad_clip)
        self.target = Target(self.critics, self.critic_optimiser, c.target_every * c.delay, c.target_tau)

    def make_actor(self, generator: torch.Generator) -> Net:
        return Net(
            self.observations.encoder(generator), self.width, self.observations.agents, self.net, generator, self.net.gain_actor
        )

    def _critic(self, generator: torch.Generator) -> ActionCritic:
        encoder, agents, net = self.observations.critic_encoder(generator), self.observations.agents, self.net
        if self.as_one:
            agents, net = ("all",), dataclasses.replace(net, share="plain")
        elif self.central and not self.spec.common:  # whose pay differs, they are judged apart
            net = dataclasses.replace(net, share="none")
        told = sum(self.spec[g].n * params_of(self.spec[g].action) for g in self.around) if self.central else self.width
        told = 0 if self.lists and not self.central else told
        gain = net.gain_actor if self.lists else net.gain_critic
        return ActionCritic(
            encoder, told, self.width if self.lists else 1, agents, net, generator, gain, self.observations.together
        )

    def _own_places(self) -> Tensor:
        """[N, W] where an agent's own action is among those of all in its critic's scope."""
        agents = [(g, i) for g in self.groups for i in range(self.spec[g].n)]
        places = [(g, i) for g in self.around for i in range(self.spec[g].n) for _ in range(params_of(self.spec[g].action))]
        return torch.tensor([[place == agent for place in places] for agent in agents])

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {"actor": self.actor, "critic": self.critics, "target_critic": self.target.module}

    @property
    def needs_peers(self) -> bool:
        return bool(self.others)

    # --- hooks ---

    @abstractmethod
    def play(self, params: Tensor, legal: Tensor | None, noise: Tensor | None, explore: bool) -> Tensor:
        """The actor's output as an action for the world."""

    @abstractmethod
    def next_action(self, params: Tensor, legal: Tensor | None, noise: Tensor) -> tuple[Tensor, Told]:
        """What is done next as the target takes it, [..., N, A], and whatever `next_value` wants to know."""

    @abstractmethod
    def next_value(self, q: Tensor, told: Told, there: Tensor | None) -> Tensor:
        """[T, B, N] what the next moment is worth, of what the critics say; `there`: who acts in it, none: all."""

    @abstractmethod
    def improve(
        self, params: Tensor, legal: Tensor | None, noise: Tensor, worth: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the actor descends, but for what its action is worth: [T, B, N]; that; and metrics [T, B, N]. `worth` says of an
        action [T, B, N, A] what each critic thinks of it."""

    def temper(self, told: dict[str, Tensor], mask: Tensor | None, keep: Tensor | None) -> None:
        """What else moves with the actor, by what `improve` told, which may be taken out of the metrics."""

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        if self.recurrent:
            zero: Any = self.actor.memory
            whole["actor"] = zero.zero(rows, device)
            whole["critic"] = {str(k): zero.zero(rows, device) for k in range(len(self.critics))}
        if self.config.noise_keep:
            whole["noise"] = torch.zeros(rows, self.n, self.width, device=device)
        return self.split_groups(whole, 1)

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        return self._act(self.actor, frame, memory, noise, explore and self.learns)

    def target_act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, target: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        return self._act(self.next_actor if target and self.learns else self.actor, frame, memory, noise, False)

    def _act(
        self, actor: Net, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        at = frame[self.groups[0]].active.dim() - 1
        before, view = self.cat_groups(memory.__getitem__, at), self._views(frame, at)
        params, state = actor(self.observations.obs(frame, at), before.get("actor"), None, self._moves(view["remembering"]))
        given, after = None if noise is None else self.cat_groups(noise.__getitem__, at), dict(before)
        if given is not None and explore and self.config.noise_keep:
            given, after["noise"] = correlated(given, before["noise"], view["start"], self.config.noise_keep)
        actions = self.play(params, view["legal"], given, explore)
        if given is not None and explore and self.config.random_steps:
            actions = self._anything(given, view["legal"]).where(self.warmup, actions)
        if self.recurrent:
            after["actor"] = state
            if explore:
                after["critic"] = {k: self._remember(k, frame, x, view) for k, x in before["critic"].items()}
        return self.split_groups(actions, at), self.split_groups(after, at), {g: {} for g in self.groups}

    def _views(self, frame: Frame, at: int) -> dict[str, Any]:
        views = {k: self.cat_groups(lambda g: getattr(frame[g], k), at) for k in ("active", "alive", "start", "legal")}  # noqa: B023
        return {**views, "remembering": self.cat_groups(lambda g: self.remembering(frame[g]), at)}

    def _moves(self, who: Tensor) -> Tensor | None:
        return who if self.recurrent and self.has_inactive else None

    def _anything(self, noise: Tensor, legal: Tensor | None) -> Tensor:
        u = noise[..., : self.width]
        if isinstance(self.space, Box):
            return u * 2 - 1
        return Choice(torch.zeros_like(u), self.space.sizes, legal, self.space.shape == ()).sample(u)

    def _remember(self, k: str, frame: Frame, state: Any, view: dict[str, Any]) -> Any:
        """A critic's memory after what is seen now. Of one that judges for all every agent has a copy, and those who start have
        lost theirs already."""
        judge: Any = self.critics[int(k)]
        seen, active = self.observations.seen(frame, view["active"].dim() - 1), self._moves(view["remembering"])
        if not self.as_one:
            return judge.see(seen, state, None, active)[1]
        who = view["start"].long().argmin(-1)[..., None, None]
        kept = tree_map(lambda x: x.take_along_dim(who, -2).masked_fill(self._begins(view)[..., None], 0), state)
        return tree_map(lambda x: x.expand(*x.shape[:-2], self.n, -1).contiguous(), judge.see(seen, kept)[1])

    def _begins(self, view: dict[str, Any]) -> Tensor:
        """[..., 1] where time begins for all who are there, and so for a critic that judges for all."""
        return (view["start"] | ~view["alive"]).all(-1, keepdim=True)

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        each = 1 + (self.config.others == "policy")
        peers = sum(self.spec[g].n * self.peers[g].noise for g in self.others)
        return steps * rows * (2 * self.n * self.width + each * peers)

    def set_schedules(self, now: Now) -> None:
        self.actor_optimiser.rate.fill_(self._rate(now))
        self.critic_optimiser.rate.fill_(self._critic_rate(now))
        self.warmup.fill_(now.step < self.config.random_steps)

    def update_statistics(self, batch: Batch) -> None:
        self.observations.update(batch.frame)
        recall.weigh(self, batch)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        with self.observations.once():
            return self._update(batch)

    def _update(self, batch: Batch) -> dict[str, Tensor]:
        happened, noise = recall.later(batch, self.burn_in), self._noise(batch)
        batch = dataclasses.replace(batch, next=self.next_frame(batch))
        later = recall.later(batch, self.burn_in)
        said = {g: self._said(later.frame, g, values.as_vector(later.actions[g], self.spec[g].action)) for g in self.around}
        with torch.no_grad():
            value_t = self._worth(batch, later, noise, True) if self.spec.turns else None
            value_tp1 = self._worth(batch, later, noise, False)
            target, mask = recall.targets(self, happened, recall.reward(self, happened), value_tp1, value_t)
        told = self._judge(batch, later, said, self._learnt(target), None if mask is None else self._learnt(mask))
        told |= self._in_time(lambda keep: self._improve(batch, later, said, noise, keep))
        self.target.follow()
        rates = {"actor": self.actor_optimiser.rate, "critic": self.critic_optimiser.rate}
        return {**told, **{f"learning_rate_{k}": x.clone() for k, x in rates.items()}, "target_lag": self.target.lag()}

    def variant(self) -> int:
        if self.config.delay == 1 or self.target.updates.is_cuda:
            return 0
        self.due = bool((self.target.updates + 1) % self.config.delay == 0)
        return 1 + self.due

    def _in_time(self, improve: Callable[[Tensor | None], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The actor's step, once in `delay` updates; in between its metrics stay what they were. Where somebody has looked
        whether it is due, nothing is computed in vain."""
        if self.config.delay == 1:
            return improve(None)
        due = (self.target.updates + 1) % self.config.delay == 0
        known, self.due = self.due, None
        if known is not False:
            told = improve(due)
            self.held.copy_(torch.stack([told[k] for k in self.held_names]).where(due, self.held))
        return dict(zip(self.held_names, self.held.clone().unbind(), strict=True))

    def _judge(
        self, batch: Batch, later: Batch, said: dict[str, Tensor], target: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        """The critics' step."""
        c, beside = self.config, self._beside(self.cat_groups(said.__getitem__, 2), said, each=False)
        actions = self.cat_groups(lambda g: self.taken(later, g), 2)
        each = []
        for k, judge in enumerate(self.critics):
            q = judge(self._features(judge, k, batch), beside)
            each.append(values.taken(q, actions, self.space) if self.lists else q.squeeze(-1))  # type: ignore[arg-type]
        q_t = self._learnt(stacked(each), 1)  # [K, T, B, N]
        loss = losses.value_error(q_t, target.expand_as(q_t), c.huber).sum(0)
        loss = loss if batch.weight is None else loss * batch.weight[:, None]
        count = loss.numel() if mask is None else mask.sum()
        norm = self.critic_optimiser.descend(losses.masked_sum(loss, mask), count, None if mask is None else mask.any())
        error, q_t = (target - q_t.detach()).abs().mean(0), q_t.detach().mean(0)
        return {
            "loss_critic": losses.masked_mean(loss.detach(), mask),
            "td_error": losses.masked_mean(error, mask),
            "predictQ": losses.masked_mean(q_t, mask),
            "grad_norm_critic": norm,
            **({"priority": values.td_priority(error, mask)} if c.prioritised else {}),
        }

    def _improve(
        self, batch: Batch, later: Batch, said: dict[str, Tensor], noise: dict[str, Any], due: Tensor | None
    ) -> dict[str, Tensor]:
        """The actor's step."""
        with torch.no_grad():
            critics = list(self.critics)[: self.heard]
            features = [self._features(judge, k, batch) for k, judge in enumerate(critics)]
            now = self.config.others == "policy"
            ask = {g: self._asked(batch, later, g, noise["now"], True) for g in self.others if now}
        params, mask = self._params(self.actor, batch), self.mask(later)

        def worth(action: Tensor) -> Tensor:
            mine = self._all_said(later.frame, self.split_groups(action, 2))
            taken = tree_map(torch.detach, mine) if now else {}
            at_once = self.as_one and now  # the slope along all actions is that along each, the others' held: one pass does
            own = self.cat_groups(mine.__getitem__, 2) if at_once else action
            beside = self._beside(own, {**said, **ask, **taken}, each=not at_once)
            q = stacked([judge(f, beside) for f, judge in zip(features, critics, strict=True)])
            q = q if self.lists else q.squeeze(-1)
            if not at_once:
                return q
            heads = self.n if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
            return q.detach() + (q - q.detach()) / heads  # each of them hears it, and has its own share of the slope

        with self.critic_optimiser.frozen():
            loss, q, told = self.improve(params, self._views(later.frame, 2)["legal"], noise["own"][self.burn_in :], worth)
        loss, mask = self._learnt(loss - q), None if mask is None else self._learnt(mask)
        count = loss.numel() if mask is None else mask.sum()
        keep = due if mask is None else mask.any() if due is None else mask.any() & due
        norm = self.actor_optimiser.descend(losses.masked_sum(loss, mask), count, keep)
        told = {k: self._learnt(x.detach()) for k, x in told.items()}
        self.temper(told, mask, keep)
        return {
            "loss_actor": losses.masked_mean(loss.detach(), mask),
            **{k: losses.masked_mean(x, mask) for k, x in told.items()},
            "grad_norm_actor": norm,
        }

    def _learnt(self, x: Tensor, at: int = 0) -> Tensor:
        """Of steps after the burn-in those that are learnt from: what follows is there for its rewards."""
        return x if x.shape[at] == self.chunk else x.narrow(at, 0, self.chunk)

    def _noise(self, batch: Batch) -> dict[str, Any]:
        """Uniform numbers [T, B, N, K]: for the actor's own loss, for its next actions, and for peers in both."""
        assert batch.noise is not None
        lead, at = batch.over.shape, 0

        def take(n: int, width: int) -> Tensor:
            nonlocal at
            size = lead.numel() * n * width
            at += size
            return batch.noise[at - size : at].reshape(*lead, n, width)  # type: ignore[index]

        own, following = take(self.n, self.width), take(self.n, self.width)
        when = ("next", "now") if self.config.others == "policy" else ("next",)
        peers = {w: {g: take(self.spec[g].n, self.peers[g].noise) for g in self.others} for w in when}
        return {"own": own, "following": following, **peers}

    def _worth(self, batch: Batch, later: Batch, noise: dict[str, Any], now: bool) -> Tensor:
        """[T, B, N] what the next moments are worth to the target critics; or the present ones, where agents wait for turns."""
        frame = later.frame if now else later.next
        view = self._views(frame, 2)
        params = self._params(self.next_actor, batch, not now)
        action, told = self.next_action(params, view["legal"], noise["following"][self.burn_in :])
        said = self._all_said(frame, self.split_groups(action, 2))
        for g in self.others:
            did = values.as_vector(later.actions[g], self.spec[g].action)
            said[g] = self._said(frame, g, did) if now else self._asked(batch, later, g, noise["next"], False)
        # one's own next action counts, whoever is gone; but that the dead do nothing where they are valued
        own = self.cat_groups(said.__getitem__, 2) if self.as_one or self.returns_after_death else action
        beside, targets = self._beside(own, said, each=not self.as_one), cast(nn.ModuleList, self.target.module)
        q = [judge(self._features(judge, k, batch, not now), beside) for k, judge in enumerate(targets)]
        lowest = torch.stack(q).amin(0) if len(q) > 1 else q[0]
        there = None
        if self.has_inactive:
            ended = self.cat_groups(lambda g: later.results[g].terminated, 2)
            there = view["active"] if now else view["active"] & ~ended
        return self.next_value(lowest if self.lists else lowest[..., 0], told, there)

    @property
    def next_actor(self) -> Net:
        """Whose next actions the target takes."""
        return self.actor

    def _asked(self, batch: Batch, later: Batch, g: str, noise: dict[str, Tensor], now: bool) -> Tensor:
        """What a peer's group does in the next frames, or in these."""
        peer = self.peers[g]
        theirs = {h: noise[h] for h in peer.groups if h in noise}
        return self._said(later.frame if now else later.next, g, peer.target_actions(batch, g, theirs, now)[self.burn_in :])

    def _said(self, frame: Frame, g: str, action: Tensor) -> Tensor:
        """Actions as critics are told: nothing of those who do not act."""
        return action * frame[g].active[..., None] if self.spec.turns or self.spec[g].mortal else action

    def _all_said(self, frame: Frame, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        return {g: self._said(frame, g, x) for g, x in actions.items()}

    def _beside(self, own: Tensor, said: dict[str, Tensor], each: bool) -> Tensor:
        """What critics are told: an agent's `own` action [..., N, A], beside what all others said. `each`: for every agent
        apart, [..., N, W]; a critic that judges for all can be told all at once, [..., 1, W]."""
        if not self.central:
            return own[..., :0] if self.lists else own
        rest = self._end_to_end(said)
        if self.lists:
            return torch.where(self.own, 0, rest)
        mine = self.split_groups(own, own.dim() - 2)
        same = all(said[g] is x for g, x in mine.items())
        every = rest if same else self._end_to_end({**said, **mine})
        if self.as_one and not each:
            return every
        return every.expand(*every.shape[:-2], *self.own.shape) if same else every.where(self.own, rest)

    def _end_to_end(self, said: dict[str, Tensor]) -> Tensor:
        """[..., 1, W]"""
        parts = [said[g].flatten(-2) for g in self.around]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1))[..., None, :]

    def _params(self, actor: Net, batch: Batch, following: bool = False) -> Tensor:
        """What an actor puts out after the burn-in, or in the moments that follow."""
        return self._look(actor, batch, lambda frame: self.observations.obs(frame, 2), "actor", following)

    def _features(self, judge: Any, k: int, batch: Batch, following: bool = False) -> Tensor:
        """What a critic makes of what it sees after the burn-in, or in the moments that follow."""
        return self._look(judge.see, batch, self.observations.seen, str(k), following)

    def _look(self, net: Callable[..., Any], batch: Batch, see: Callable[[Frame], Any], whose: str, following: bool) -> Tensor:
        """What a net says; with memory from that held before the batch, and of what follows a step from that after each."""
        if not self.recurrent:
            return net(see(batch.next if following else batch.frame))[0]
        actor, after_all = whose == "actor", recall.later(batch, self.burn_in).next

        def moment(frame: Frame) -> tuple[Tensor, Tensor | None]:
            """Where memory begins, and whose goes on: that of those who are gone by then as well."""
            view = self._views(frame, 2)
            if self.as_one and not actor:
                return self._begins(view), None
            return view["start"], self._moves(view["remembering"] if frame is batch.frame else view["active"] | ~view["alive"])

        state = self.cat_groups(lambda g: batch.memory[g]["actor"] if actor else batch.memory[g]["critic"][whose], 1)
        state = tree_map(lambda x: x[..., :1, :], state) if self.as_one and not actor else state
        out, after = recall.unrolled(net, self.burn_in, see(batch.frame), state, *moment(batch.frame))
        if not following:
            return out
        start, active = moment(after_all)
        after = tree_map(torch.detach, after)
        return net(see(after_all), where_rows(start, tree_map(torch.zeros_like, after), after), None, active)[0]

    def values(self, frame: Frame) -> Tensor:
        """What a batch's moments are worth, [T, B, N], to nets without memory, beside what the others would do."""
        said = {}
        for g in self.around:
            rows = frame[g].active.shape[1]
            actions = self.peers[g].act(frame, self.peers[g].memory(rows, frame[g].active.device), None, False)[0][g]
            said[g] = self._said(frame, g, values.as_vector(actions, self.spec[g].action))
        beside = self._beside(self.cat_groups(said.__getitem__, 2), said, each=not self.as_one)
        judge: Any = self.critics[0]
        q = judge(judge.see(self.observations.seen(frame))[0], beside)
        q = values.expected(q, self.cat_groups(said.__getitem__, 2), self.space) if self.lists else q[..., 0]  # type: ignore[arg-type]
        return q.expand(-1, -1, self.n)
