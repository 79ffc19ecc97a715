"""What on-policy actor-critics share: they learn from a rollout of what just happened, once, and then from the next.

An update goes so:

    1. the critic values all moments and the true next ones, in large batches of bounded size; with memory, the whole rollout at
       once is unrolled from the memory before its first step, and the next moments are one more step from that after each;
    2. advantages and targets by generalised advantage estimation (`ops/returns.py`);
    3. some epochs of minibatches, each of which is one step of the actor and one of the critic (`policy_loss` is the
       algorithm's own, the one hook to override);
    4. the statistics of observations move: after the update, so that every ratio began at one.

A minibatch is made of chunks: `chunk` steps of a row that stay together, one where there is no memory. A chunk starts from the
memory before its first step, and gradients go back to there and no further. Minibatches of whole episodes are those of
`--algo.chunk all --algo.episodes 1`, where no episode ends early.

A module of the user's own is in eval mode while it acts and values, and in train mode where a gradient is taken: with dropout
ratios do not begin at one.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shoal.algos.base import AfterDeath, Algorithm, Optimiser, Rollout, bounded
from shoal.algos.observations import Given, Observations, Scope
from shoal.buffers.minibatches import minibatches, spans
from shoal.nets.heads import Actor
from shoal.nets.layers import NetConfig
from shoal.nets.norm import Running, normaliser
from shoal.ops import losses, schedules
from shoal.ops.distributions import Choice, noise_of
from shoal.ops.explore import correlated
from shoal.ops.returns import gae, unsettled_turns
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, EnvSpec, Frame, UserError, tree_leaves, tree_map, where_rows

SLAB = 1 << 17  # moments evaluated at once when values are computed
Data = dict[str, Any]  # name -> a tree of [T, B, N, ...]


class OnPolicy(Algorithm, ABC):
    @dataclass(frozen=True)
    class Config:
        rollout: int = 25  # steps between updates
        episodes: int | None = None  # instead of `rollout`: so many times the longest an episode can be
        chunk: Literal["auto", "all"] | int = "auto"  # steps of a row kept together in a minibatch; auto: 1, with memory all
        gamma: float = 0.99  # discount
        lam: float = 0.95  # GAE's lambda
        time_limit: bool = True  # bootstrap where an episode was cut off; false: as if it had terminated
        after_death: AfterDeath = (
            "auto"  # a return ends with the agent (own) or its team's episode; auto: team if pay is common
        )
        entropy: float = 0.01  # weight of the entropy bonus
        entropy_schedule: str = "constant"  # as lr_schedule, without kl
        entropy_last: float = 0.0  # share of the entropy weight that its schedule ends at
        value_weight: float = 1.0  # weight of the value loss
        huber: float | None = None  # value errors beyond this count linearly; none: squared errors
        lr: float = 7e-4  # learning rate
        lr_critic: float | None = None  # learning rate of the critic; none: the same
        lr_schedule: str = (
            "constant"  # linear, cosine, exponential, exponential:0.999/update or /step, kl, kl:0.01, module:Class
        )
        lr_last: float = 0.0  # share of the learning rate that its schedule ends at
        weight_decay: float = 0.0  # decoupled, as in AdamW
        grad_clip: float | None = 0.5  # norm beyond which gradients are scaled down; none: never
        random_steps: int = 0  # environment steps of uniformly random actions at the beginning
        learning_starts: int = 0  # environment steps before the first step down; statistics move from the first
        critic: Scope = "own"  # what the critic sees: own observation, the team's or the world's
        critic_input: Given = "state"  # of the world: its state or else joined; joined observations; agent: state and own too
        critic_slices: int = 0  # train the critic in so many slices of time, last first, before the actor; 0: with it
        target_tau: float | None = None  # values from a copy of the critic that follows at this rate; none: from the critic
        advantage_scope: Literal["none", "batch", "group", "agent"] = "group"  # normalised over what; batch: a minibatch
        normalise_value: bool = True  # the critic learns returns of mean 0 and deviation 1
        normalise_obs: bool = True  # observations and states of mean 0 and deviation 1, by running statistics
        normalise_reward: bool = False  # rewards divided by their running root mean square
        normaliser: str | None = None  # your own in place of the running one: package.module:Class or file.py:Class
        reward_scale: float = 1.0  # rewards are multiplied by it before anything is learnt; reported returns stay raw
        shaper: str | None = None  # your own function (reward, obs, step, steps) -> reward, as module:name or file.py:name
        squash: bool = False  # continuous actions: tanh into the bounds; else they are clipped
        log_std: float = 0.0  # continuous actions: log of the first standard deviation
        noise_keep: float = 0.0  # continuous actions: correlation of exploration with that of the step before

        def __post_init__(self) -> None:
            whole = ("rollout", "episodes", "epochs", "minibatches")
            real = ("lr", "lr_critic", "clip", "value_clip", "huber", "grad_clip", "kl_stop", "value_weight", "reward_scale")
            bounds: dict[str, tuple[float, float]] = {
                **dict.fromkeys(("gamma", "lam", "lr_last", "entropy_last", "clip_last", "target_tau"), (0, 1)),
                **dict.fromkeys(("entropy", "weight_decay", "random_steps", "learning_starts", "critic_slices"), (0, 1e30)),
                "log_std": (-5, 2),
                "noise_keep": (0, 0.9999),
            }
            bounded(self, bounds, (*whole, *real))
            if isinstance(self.chunk, int) and self.chunk < 1:
                raise UserError(f"--algo.chunk is {self.chunk}: it takes a number of steps, auto, or all.")

    epochs, minibatches = 1, 1  # passes over a rollout, and pieces of each
    value_clip: float | None = None
    kl_stop: float | None = None
    advantage_every: Literal["rollout", "epoch", "minibatch"] = "rollout"  # how often they are computed
    measures_kl: ClassVar[bool] = False  # `policy_loss` tells how far the policy moved

    entropy_weight: Tensor
    warmup: Tensor
    learning: Tensor

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
        self.noise = noise_of(self.space)
        if c.noise_keep and not isinstance(self.space, Box):
            raise UserError(f"--algo.noise-keep is for continuous actions; those of {', '.join(groups)} are {self.space.kind}.")
        self.steps = c.rollout if c.episodes is None else self._whole_episodes(c.episodes)
        self.feed, self.chunk = Rollout(self.steps), self._chunk(c.chunk, self.steps)
        self.slices = min(c.critic_slices, self.steps)
        make_norm = normaliser(c.normaliser)
        self.observations = Observations(
            self, c.critic, c.critic_input, net, c.normalise_obs, make_norm, blank=self.returns_after_death
        )
        self.recurrent = net.memory != "none"
        self.shared = net.trunk == "shared"
        if self.shared and (self.observations.central or self.slices or net.critic_hidden or c.lr_critic):
            raise UserError(
                "--net.trunk shared is one net for actor and critic: it takes --algo.critic own, and no --algo.critic-slices, "
                "--net.critic-hidden or --algo.lr-critic."
            )
        self.actor = Actor(
            self.observations.encoder(generator), self.space, self.observations.agents, net, generator, c.squash, c.log_std
        )
        self.critic = None if self.shared else self.observations.critic(generator)
        self.target = copy.deepcopy(self.critic or self.actor).requires_grad_(False) if c.target_tau is not None else None
        self.value_norm = make_norm() if c.normalise_value else None
        self.reward_norm = Running() if c.normalise_reward else None
        self.lr_kl = schedules.kl_target(c.lr_schedule, "--algo.lr-schedule")
        if self.lr_kl is not None and not self.measures_kl:
            raise UserError(
                f"--algo.lr-schedule is {c.lr_schedule}, and {type(self).__name__} takes one step: it has moved by nothing."
            )
        shape = "constant" if self.lr_kl is not None else c.lr_schedule
        self._rate = schedules.make(shape, c.lr, c.lr * c.lr_last, "--algo.lr-schedule")
        self._weight = schedules.make(c.entropy_schedule, c.entropy, c.entropy * c.entropy_last, "--algo.entropy-schedule")
        self.register_buffer("entropy_weight", torch.tensor(c.entropy))
        self.register_buffer("warmup", torch.tensor(c.random_steps > 0))  # act at random
        self.register_buffer("learning", torch.tensor(c.learning_starts == 0))
        self.to(device)
        self.actor_optimiser = Optimiser([self.actor], c.lr, c.weight_decay, c.grad_clip)
        if self.critic is not None:
            self.critic_optimiser = Optimiser([self.critic], c.lr_critic or c.lr, c.weight_decay, c.grad_clip)

    def _whole_episodes(self, episodes: int) -> int:
        if self.spec.horizon is None:
            raise UserError("--algo.episodes needs a world whose episodes have a longest length: give --algo.rollout instead.")
        return episodes * self.spec.horizon

    def _chunk(self, asked: str | int, steps: int) -> int:
        if asked == "auto":
            return steps if self.net.memory != "none" else 1
        chunk = steps if asked == "all" else int(asked)
        if steps % chunk:
            raise UserError(f"--algo.chunk is {chunk}: it must divide the {steps} steps between updates.")
        return chunk

    @property
    def nets(self) -> dict[str, torch.nn.Module]:
        nets = {"actor": self.actor, "critic": self.critic, "target_critic": self.target}
        return {k: m for k, m in nets.items() if m is not None}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        parts = {k: m.net.memory for k, m in (("actor", self.actor), ("critic", self.critic)) if m is not None}
        whole: dict[str, Any] = {k: m.zero(rows, device) for k, m in parts.items() if m is not None}
        if self.config.noise_keep:
            whole["noise"] = torch.zeros(rows, self.n, self.noise, device=device)
        return self.split_groups(whole, 1)

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        at = frame[self.groups[0]].active.dim() - 1
        legal = self.cat_groups(lambda g: frame[g].legal, at)
        before = self.cat_groups(memory.__getitem__, at)
        obs, active = self.observations.obs(frame, at), self._moves(frame, at)
        pi, _, after = self.actor.unroll(obs, legal, before.get("actor"), None, active)
        states: dict[str, Any] = {**before, "actor": after} if self.recurrent else dict(before)
        if self.recurrent and explore and self.critic is not None:
            seen = self.observations.seen(frame, at) if self.observations.central else obs
            states["critic"] = self.critic.value(seen, before["critic"], None, active)[1]
        given = None if noise is None else self.cat_groups(noise.__getitem__, at)
        if given is not None and self.config.noise_keep:
            start = self.cat_groups(lambda g: frame[g].start, at)
            given, states["noise"] = correlated(given, before["noise"], start, self.config.noise_keep)
        memory = self.split_groups(states, at) if states else memory
        if given is None:
            return self.split_groups(pi.mode(), at), memory, {g: {} for g in self.groups}
        actions, log_prob = pi.draw(given)
        if explore and self.learns and self.config.random_steps:
            any_action, any_log_prob = self._anything(given, legal)
            actions, log_prob = any_action.where(self.warmup, actions), any_log_prob.where(self.warmup, log_prob)
        extras = {g: {"log_prob": x} for g, x in self.split_groups(log_prob, at).items()}
        return self.split_groups(actions, at), memory, extras

    def _anything(self, noise: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Any action, each as likely, and its log-probability."""
        if isinstance(self.space, Box):
            return noise * 2 - 1, torch.full_like(noise[..., 0], -noise.shape[-1] * math.log(2))
        return Choice(torch.zeros_like(noise), self.space.sizes, legal, self.space.shape == ()).draw(noise)

    def _moves(self, frame: Frame, agents_at: int) -> Tensor | None:
        """[..., N] whose memory goes on; none where everybody's always does, or nobody has one."""
        return (
            self.cat_groups(lambda g: self.remembering(frame[g]), agents_at) if self.recurrent and self.has_inactive else None
        )

    # --- learning ---

    @abstractmethod
    def policy_loss(self, log_prob: Tensor, entropy: Tensor, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
        """What the policy descends, a sum over active samples, less the weighted entropy; and means to log."""

    def draws(self, steps: int, rows: int) -> int:
        return 0 if self.minibatches == 1 else self.epochs * (steps // self.chunk) * rows

    def set_schedules(self, now: Now) -> None:
        c = self.config
        if self.lr_kl is None:
            self._set_rate(self._rate(now))
        self.entropy_weight.fill_(self._weight(now))
        self.warmup.fill_(now.step < c.random_steps)
        self.learning.fill_(now.step >= c.learning_starts)

    def _set_rate(self, rate: float | Tensor) -> None:
        c = self.config
        optimisers = (self.actor_optimiser,) if self.critic is None else (self.actor_optimiser, self.critic_optimiser)
        for optimiser, times in zip(optimisers, (1.0, (c.lr_critic or c.lr) / c.lr), strict=False):
            optimiser.rate.copy_(rate * times) if isinstance(rate, Tensor) else optimiser.rate.fill_(rate * times)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            self._as_in(acting=True)
            data = self._data(batch)
            known = self._unroll(data, self.cat_groups(batch.memory.__getitem__, 1))
            data["value"] = known[0]  # in the normaliser's units of now, in which the critic goes on speaking
            told = self._judge(batch, data, known)
            orders = self._orders(batch)
        going = self.learning if self.config.learning_starts or self.kl_stop is not None else None
        steps: list[dict[str, Tensor]] = []
        for epoch, order in enumerate(orders):
            if epoch and self.advantage_every == "epoch":
                self._judge(batch, data)
            critic_told = (
                self._descend_slices(data, fresh=not epoch or self.advantage_every != "rollout") if self.slices else {}
            )
            began = len(steps)
            for k, piece in enumerate(self._pieces(data, order)):
                if self.advantage_every == "minibatch" and (epoch or k):
                    self._judge(batch, data)
                    piece = self._pieces(data, order)[k]
                metrics, going = self._descend(piece, going)
                steps.append({**metrics, **critic_told})
            if self.lr_kl is not None and len(steps) > 1:  # before the first step nothing has moved
                kl = torch.stack([s["kl"] for s in steps[began:]]).mean()
                rate, mask = self.actor_optimiser.rate, data.get("mask")
                moved = self.learning & ~self.warmup & (True if mask is None else mask.any())  # by steps, and from itself
                self._set_rate(schedules.kl_adapted(rate, kl, self.lr_kl).where(moved, rate))
        self._follow()
        self.observations.update(batch.frame)  # after the update, so that its ratios began at one
        metrics = {k: torch.stack([s[k] for s in steps]).mean() for k in steps[0]}
        return {**metrics, **told, "learning_rate": self.actor_optimiser.rate.clone()}

    # --- the parts of an update ---

    def _data(self, batch: Batch) -> Data:
        """What a step down needs, [T, B, N, ...]; entries that are none are left out."""
        mask, unsettled = self.mask(batch), self._unsettled(batch)
        observations, central = self.observations, self.observations.central
        data = {
            "obs": observations.obs(batch.frame, 2),
            "seen": observations.seen(batch.frame) if central else None,  # else the same as obs
            "action": self.cat_groups(lambda g: batch.actions[g], 2),
            "log_prob": self.cat_groups(lambda g: batch.extras[g]["log_prob"].detach(), 2),
            "legal": self.cat_groups(lambda g: batch.frame[g].legal, 2),
            "mask": mask if mask is None or unsettled is None else mask & ~unsettled,
            "valued": self.valued(batch) if self.returns_after_death and not self.spec.turns else None,  # else the same as mask
        }
        if self.recurrent:
            data["start"] = self.cat_groups(lambda g: batch.frame[g].start, 2)
            data["moves"] = self._moves(batch.frame, 2)
        return {k: x for k, x in data.items() if x is not None}

    def _unroll(self, data: Data, first: dict[str, Any]) -> tuple[Tensor, Any]:
        """The critic's values and its memory after each moment, from the memory before the first. Memories before each moment
        are put into `data`."""
        name, moment = self._judging_name, (data.get("start"), data.get("moves"))
        value, after = self._values(self._judging, self._seen(data), first.get(name), *moment)
        if self.recurrent:
            states = {name: after}
            if self.critic is not None:
                states["actor"] = self.actor.unroll(data["obs"], data.get("legal"), first["actor"], *moment)[2]
            data["memory"] = {k: tree_map(lambda a, b: torch.cat((a[None], b[:-1])), first[k], states[k]) for k in states}
        return value, after

    @property
    def _judging(self) -> Any:
        return self.actor if self.critic is None else self.critic

    @property
    def _judging_name(self) -> str:
        return "actor" if self.critic is None else "critic"

    def _seen(self, data: Data) -> Any:
        return data["seen"] if self.observations.central else data["obs"]

    @torch.no_grad()
    def _judge(self, batch: Batch, data: Data, known: tuple[Tensor, Any] | None = None) -> dict[str, Tensor]:
        """Put advantages and targets by the critic of now into `data`. The first time, when its values are `known`, the
        statistics move."""
        self._as_in(acting=True)
        critic, first = self._judging if self.target is None else self.target, known is not None
        if known is None or self.target is not None:
            before = tree_map(_first, data.get("memory", {}).get(self._judging_name))
            known = self._values(critic, self._seen(data), before, data.get("start"), data.get("moves"))
        value, after = known
        after = where_rows(self.cat_groups(lambda g: batch.next[g].start, 2), tree_map(torch.zeros_like, after), after)
        following = self.next_frame(batch)
        value_tp1, _ = self._values(critic, self.observations.seen(following), after, None, self._last_seen(following))
        value, value_tp1 = self._denormalised(value), self._denormalised(value_tp1)
        advantage = self._advantage(batch, value, value_tp1, first)
        target = advantage + value
        told = {"explained_variance": losses.explained_variance(value, target, _valued(data))}
        if self.value_norm is not None:
            if first:
                self.value_norm.update(target, _valued(data))
            target = self.value_norm.normalise(target)
        data["advantage"], data["target"] = self._scaled(advantage, data.get("mask")), target
        return told

    def _advantage(self, batch: Batch, value: Tensor, value_tp1: Tensor, first: bool = True) -> Tensor:
        c = self.config
        reward = self.earned(batch)
        reward = reward if c.reward_scale == 1 else reward * c.reward_scale
        if self.reward_norm is not None:
            if first:
                there = (
                    self.cat_groups(lambda g: batch.frame[g].alive, 2) if self.has_inactive else None
                )  # pay may come out of turn
                self.reward_norm.update(reward, there)
            reward = self.reward_norm.divide(reward)
        terminated, cut = self.ends(batch)
        active = self.cat_groups(lambda g: batch.frame[g].active, 2) if self.spec.turns else None
        return gae(reward, value, value_tp1, terminated, cut, c.gamma, c.lam, active, self._unsettled(batch), self.fused)

    def _scaled(self, advantage: Tensor, mask: Tensor | None) -> Tensor:
        scope = self.config.advantage_scope
        if scope in ("none", "batch"):
            return advantage
        return losses.normalise(advantage, mask, (0, 1) if scope == "agent" else None)

    def _unsettled(self, batch: Batch) -> Tensor | None:
        """[T, B, N] turns of which too little is known to learn from, in turn-based worlds."""
        if not self.spec.turns:
            return None
        terminated, cut = self.ends(batch)
        active = self.cat_groups(lambda g: batch.frame[g].active, 2)
        return unsettled_turns(terminated, terminated | cut, active, self.turn_tp1(batch))

    def _last_seen(self, following: Frame) -> Tensor | None:
        """[T, B, N] whose memory goes on in the next frames: that of those to move, and of the gone. None: everybody's."""
        return self.cat_groups(lambda g: following[g].active | ~following[g].alive, 2) if self.has_inactive else None

    def values(self, frame: Frame) -> Tensor:
        """V of a batch's frames in the units of the rewards that are learnt from, [T, B, N], of a critic without memory."""
        return self._denormalised(self._values(self._judging, self.observations.seen(frame))[0])

    def _values(
        self, critic: Any, seen: Any, memory: Any = None, start: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """What the critic says of [T, B, ...], in slabs of bounded size where it has no memory; and its memory after each."""
        if self.recurrent:
            return critic.value(seen, memory, start, active)
        steps, rows = tree_leaves(seen)[0].shape[:2]
        each = max(1, SLAB // rows)
        slabs = [tree_map(lambda x, t=t: x[t : t + each], seen) for t in range(0, steps, each)]
        return torch.cat([critic.value(x)[0] for x in slabs]), {}

    def _denormalised(self, value: Tensor) -> Tensor:
        return value if self.value_norm is None else self.value_norm.denormalise(value)

    def _orders(self, batch: Batch) -> list[Tensor | None]:
        """For each epoch the order of the chunks, or none where they are all taken at once."""
        if self.minibatches == 1:
            return [None] * self.epochs
        assert batch.noise is not None
        return list(batch.noise.reshape(self.epochs, -1).argsort(-1))

    def _pieces(self, data: Data, order: Tensor | None) -> list[Data]:
        """Minibatches: [chunk, so many chunks, N, ...], with the memory before each chunk, [so many chunks, N, ...]."""
        steps, rows = data["value"].shape[:2]
        if order is None and (not self.recurrent or self.chunk == steps):
            return [{k: tree_map(_first, x) if k == "memory" else x for k, x in data.items()}]
        return minibatches(data, steps, rows, self.chunk, self.minibatches, order)

    def _descend(self, data: Data, going: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        """One step of actor and critic on one minibatch, where `going` holds; and whether to go on."""
        self._as_in(acting=False)
        mask, memory, moment = data.get("mask"), data.get("memory", {}), (data.get("start"), data.get("moves"))
        pi, value, _ = self.actor.unroll(data["obs"], data.get("legal"), memory.get("actor"), *moment)
        log_prob, entropy = pi.log_prob_and_entropy(data["action"])
        if self.config.advantage_scope == "batch":
            data = {**data, "advantage": losses.normalise(data["advantage"], mask)}
        loss, metrics = self.policy_loss(log_prob, entropy, data)
        metrics["entropy_loss"] = -self.entropy_weight * metrics["entropy"]
        if isinstance(self.space, Box):
            metrics["std"] = self.actor.log_std.detach().exp().mean()
        count, active = _counted(log_prob, mask)
        value_count, valued = _counted(log_prob, _valued(data))
        if self.kl_stop is not None:
            assert going is not None
            going = going & (self.warmup | (metrics["kl"] <= self.kl_stop))  # how far it is from random actions is no matter
            metrics["kept"] = going.float()
        if self.critic is None:
            value_loss, mean = self._value_loss(value, data)  # type: ignore[arg-type]
            if "valued" in data:  # two means, of unequal numbers
                loss = loss * (value_count / count.clamp(min=1))
            metrics["grad_norm"] = self.actor_optimiser.descend(loss + value_loss, value_count, _both(valued, going))
            return {**metrics, **mean}, going
        metrics["grad_norm_actor"] = self.actor_optimiser.descend(loss, count, _both(active, going))
        if not self.slices:  # a policy that went far enough does not stop the critic
            value, _ = self.critic.value(self._seen(data), memory.get("critic"), *moment)
            value_loss, mean = self._value_loss(value, data)
            keep = _both(valued, self.learning if self.config.learning_starts else None)
            metrics = {**metrics, **mean, "grad_norm_critic": self.critic_optimiser.descend(value_loss, value_count, keep)}
        return metrics, going

    def _value_loss(self, value: Tensor, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        old, target = data["value"], data["target"]
        loss, mean = losses.value(value, old, target, _valued(data), self.value_clip, c.huber, self.fused)
        return loss if c.value_weight == 1 else loss * c.value_weight, mean

    def _descend_slices(self, data: Data, fresh: bool) -> dict[str, Tensor]:
        """The critic a slice of time at a time, the last first, towards targets that stay; no step is left out. A `fresh`
        advantage is the target less the value predicted just before the slice's own step."""
        assert self.critic is not None
        self._as_in(acting=False)
        predicted, told, counts = [], [], []
        for a, b in reversed(spans(len(data["value"]), self.slices)):
            part = {k: tree_map(lambda x: x[a:b], x) for k, x in data.items()}  # noqa: B023
            memory = tree_map(_first, part["memory"]["critic"]) if self.recurrent else None
            value, _ = self.critic.value(self._seen(part), memory, part.get("start"), part.get("moves"))
            predicted.append(value.detach())
            loss, mean = self._value_loss(value, part)
            count, active = _counted(value, _valued(part))
            told.append({**mean, "grad_norm_critic": self.critic_optimiser.descend(loss, count, _both(active, self.learning))})
            counts.append(count)
        if fresh:
            value = self._denormalised(torch.cat(predicted[::-1]))
            data["advantage"] = self._scaled(self._denormalised(data["target"]) - value, data.get("mask"))
        return losses.weighted_means(told, counts)

    def _as_in(self, acting: bool) -> None:
        """The mode for modules of the user's own; ours know none."""
        if self.net.module is not None:
            self.train(not acting)

    @torch.no_grad()
    def _follow(self) -> None:
        if self.target is not None:
            torch._foreach_lerp_(list(self.target.parameters()), list(self._judging.parameters()), self.config.target_tau)
            for mine, theirs in zip(self.target.buffers(), self._judging.buffers(), strict=True):
                mine.copy_(theirs)


def _counted(x: Tensor, mask: Tensor | None) -> tuple[Any, Tensor | None]:
    """How many samples are active, and whether any is (without one there is no step, for Adam would go on moving)."""
    if mask is None:
        return x.numel(), None
    count = mask.sum()
    return count, count > 0


def _valued(data: Data) -> Tensor | None:
    """Whose values are learnt."""
    return data.get("valued", data.get("mask"))


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _first(x: Tensor) -> Tensor:
    return x[0]
