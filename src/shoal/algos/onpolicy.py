"""What on-policy actor-critics share: they learn from a rollout of what just happened, once, and then from the next.

An update, `update` of `algos/ppo.py` and `algos/a2c.py`, is made of these parts:

    prepare              the critic values all frames and the true next ones (`compute_advantages`: generalised advantage
                         estimation, `ops/returns.py`); what a step needs is put side by side in a `Minibatch`
    update_minibatch     one step of the actor (`actor_loss` is the algorithm's own, the hook to override) and one of the critic
    finish               the statistics of observations move: after the update, so that every ratio began at one

A minibatch is made of chunks: `chunk` steps of a row that stay together, one where there is no memory. A chunk starts from the
memory before its first step, and gradients go back to there and no further. Chunks are whole episodes with `--algo.chunk all
--algo.episodes 1`, or with `--algo.minibatch-episodes`. What nets remember is in `algos/recurrence.py`, critics that are
trained in slices of time in `algos/slices.py`.

A rollout of whole episodes (`--algo.episodes`) has as many steps as they can last. Where they end early the rest is padding
(`training/collect.py`): the masks of `Samples` leave it out of losses and statistics.

A module of the user's own is in eval mode while it acts and values, and in train mode where a gradient is taken: with dropout
ratios do not begin at one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shoal.algos import defaults
from shoal.algos.base import Acted, Algorithm, LearnerConfig, Seat, StateConfig, rollout_of
from shoal.algos.checks import bounded, trunk_fits
from shoal.algos.observations import CriticInput, Observations, Scope
from shoal.algos.recurrence import add_memory, remember_policy
from shoal.algos.samples import Samples, in_slabs
from shoal.buffers.minibatches import minibatches
from shoal.nets.heads import Actor
from shoal.nets.norm import Running
from shoal.nets.own import normaliser
from shoal.ops import losses, schedules
from shoal.ops.distributions import noise_of
from shoal.ops.explore import random_draw
from shoal.ops.returns import gae
from shoal.ops.schedules import Now
from shoal.spec import Box, Frame, UserError
from shoal.tree import cat_groups, split_groups, tree_map

Metrics = dict[str, Tensor]


@dataclass
class Minibatch:
    """What a step of actor and critic is taken on, a rollout or a part of it: [T, B, N, ...]."""

    actor_input: Any
    critic_input: Any
    action: Tensor
    log_prob: Tensor  # of the policy that acted
    legal: Tensor | None
    active: Tensor | None  # who is in the policy's loss; none: all
    valued: Tensor | None  # whose values are learnt; none: all
    start: Tensor | None = None
    remembers: Tensor | None = None  # whose memory goes on; none: everybody's
    memory: Any = None  # of actor and critic, before each step; of a minibatch before its first
    value: Any = None  # by the critic before the update, in the normaliser's units of then
    advantage: Any = None
    target: Any = None  # of the value, in the normaliser's units

    def memory_of(self, net: str) -> tuple[Any, Tensor | None, Tensor | None]:
        """What a net with memory takes: that before the first step, where it is zeroed, and whose goes on."""
        return (self.memory or {}).get(net), self.start, self.remembers

    def with_first_memory(self) -> Minibatch:
        """With the memory before its first step, of that before each."""
        return replace(self, memory=tree_map(lambda x: x[0], self.memory))


class OnPolicy(Algorithm, ABC):
    @dataclass(frozen=True)
    class Config(StateConfig, LearnerConfig):
        rules: ClassVar[defaults.Rules] = {
            **LearnerConfig.rules,
            "gamma": defaults.far_gamma,
            "lam": defaults.lam,
            "rollout": defaults.rollout,
            "entropy": defaults.entropy,
            "noise_keep": defaults.noise_keep,
        }

        rollout: int | None = None  # steps between updates; none: an episode's where it lasts at most 50, else 128
        episodes: int | None = (
            None  # instead of `rollout`: whole episodes of every row; steps after those that end early are left out
        )
        chunk: Literal["auto", "all"] | int = "auto"  # steps of a row kept together in a minibatch; auto: 1, with memory all
        gamma: float | None = None  # discount; none: 0.95 where episodes last at most 50 steps, 0.995 from 500 on, else 0.99
        lam: float | None = None  # GAE's lambda; none: 0.98 where episodes last 500 steps and more, else 0.95
        entropy: float | None = (
            None  # weight of the entropy bonus; none: of choices 0.01, of teams 0.02; of continuous actions 0
        )
        entropy_schedule: str = "constant"  # as lr_schedule, without kl
        entropy_last: float = 0.0  # share of the entropy weight that its schedule ends at
        value_weight: float = 1.0  # weight of the value loss
        lr: float | None = 1e-3  # learning rate
        lr_critic: float | None = None  # learning rate of the critic; none: the same
        lr_schedule: str = (
            "linear"  # constant, linear, cosine, exponential (:0.999/update), kl, kl:0.01, StepLR:step_size=100, module:Class
        )
        grad_clip: float | None = 0.5  # norm beyond which gradients are scaled down; none: never
        random_steps: int = 0  # environment steps of uniformly random actions at the beginning
        learning_starts: int = 0  # environment steps before the first step down; statistics move from the first
        critic: Scope = "own"  # what the critic sees: own observation, the team's or the world's
        critic_input: CriticInput = (
            "state"  # state: the world's, or else all observations; joined: all observations; agent: and its own
        )
        critic_slices: int = 0  # train the critic in so many slices of time, last first, before the actor; 0: with it
        target_tau: float | None = None  # values from a copy of the critic that follows at this rate; none: from the critic
        advantage_scope: Literal["none", "batch", "group", "agent"] = "group"  # normalised over what; batch: a minibatch
        normalise_value: bool = True  # the critic learns returns of mean 0 and deviation 1
        squash: bool = False  # continuous actions: tanh into the bounds; else they are clipped
        log_std: float = 0.0  # continuous actions: log of the first standard deviation
        noise_keep: float | None = (
            None  # continuous actions: correlation of exploration from step to step; none: by the horizon
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            shares = dict.fromkeys(("lam", "entropy_last", "clip_last", "target_tau"), (0.0, 1.0))
            counts = dict.fromkeys(("entropy", "random_steps", "learning_starts", "critic_slices"), (0.0, 1e30))
            bounds = {**shares, **counts, "log_std": (-5, 2), "noise_keep": (0, 0.9999)}
            real = ("lr_critic", "clip", "value_clip", "kl_stop", "value_weight")
            bounded(self, bounds, ("episodes", "epochs", "minibatches", "minibatch_episodes", *real))
            if isinstance(self.chunk, int) and self.chunk < 1:
                raise UserError(f"--algo.chunk is {self.chunk}: it takes a number of steps, auto, or all.")

    value_clip: float | None = None
    kl_stop: float | None = None
    measures_kl: ClassVar[bool] = False  # `actor_loss` says how far the policy moved

    entropy_weight: Tensor
    warmup: Tensor
    learning: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c, net, generator = self.config, self.net, seat.generator
        self.noise = noise_of(self.space)
        if c.noise_keep and not isinstance(self.space, Box):
            kind = self.space.kind
            raise UserError(f"--algo.noise-keep is for continuous actions; those of {', '.join(self.groups)} are {kind}.")
        self.feed = rollout_of(c, self.spec)
        self.steps = self.feed.steps
        self.chunk, self.slices = self._chunk(c.chunk, self.steps), min(c.critic_slices, self.steps)
        self.observations = Observations(self, c.critic, c.critic_input)
        self.shared, seen = net.trunk == "shared", self.observations
        if self.shared:
            trunk_fits(c, net)
        state_width = seen.state_width if self.shared and seen.central else None
        encoder, form = seen.encoder(generator), (c.squash, c.log_std, state_width)
        self.actor = Actor(encoder, self.space, seen.agents, net, generator, *form)
        self.critic = None if self.shared else seen.critic(generator)
        self.target = copy.deepcopy(self.critic or self.actor).requires_grad_(False) if c.target_tau is not None else None
        self.value_norm = normaliser(c.normaliser)() if c.normalise_value else None
        self.reward_norm = Running() if c.normalise_reward else None
        self.lr_kl = schedules.kl_target(c.lr_schedule, "--algo.lr-schedule")
        if self.lr_kl is not None and not self.measures_kl:
            raise UserError(
                f"--algo.lr-schedule is {c.lr_schedule}, and {type(self).__name__} takes one step: it has moved by nothing."
            )
        self._rate = self.schedule("lr") if self.lr_kl is None else None
        critic = self.critic_rate, self.critic_rate * c.lr_last
        self._critic_rate = self.schedule("lr", *critic) if self.lr_kl is None else None
        self._entropy = self.schedule("entropy")
        self.register_buffer("entropy_weight", torch.tensor(c.entropy))
        self.register_buffer("warmup", torch.tensor(c.random_steps > 0))  # act at random
        self.register_buffer("learning", torch.tensor(c.learning_starts == 0))
        self.place(seat.device)
        self.actor_optimiser = self.make_optimiser([self.actor], c.lr)
        if self.critic is not None:
            self.critic_optimiser = self.make_optimiser([self.critic], self.critic_rate)

    def _chunk(self, asked: str | int, steps: int) -> int:
        if asked == "auto":
            return steps if self.recurrent else 1
        chunk = steps if asked == "all" else int(asked)
        if steps % chunk:
            raise UserError(f"--algo.chunk is {chunk}: it must divide the {steps} steps between updates.")
        return chunk

    @property
    def critic_rate(self) -> float:
        """The critic's learning rate, at first."""
        return self.config.lr_critic or self.config.lr

    @property
    def nets(self) -> dict[str, torch.nn.Module]:
        nets = {"actor": self.actor, "critic": self.critic, "target_critic": self.target}
        return {k: m for k, m in nets.items() if m is not None}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        whole = super().memory(rows, device)
        if self.config.noise_keep:
            for g in self.groups:
                whole[g] = {**whole[g], "noise": torch.zeros(rows, self.spec[g].n, self.noise, device=device)}
        return whole

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        at = frame[self.groups[0]].active.dim() - 1
        cat, split = partial(cat_groups, self.groups, agents_at=at), partial(split_groups, self.spec, self.groups, agents_at=at)
        obs, legal = self.observations.actor_input(frame), cat(lambda g: frame[g].legal)
        u = None if noise is None else cat(noise.__getitem__)
        if self.recurrent or self.config.noise_keep:
            pi, u, after = remember_policy(self, frame, cat, cat(memory.__getitem__), obs, legal, u, explore)
            memory = split(after)
        else:
            pi = self.actor.unroll(obs, legal)[0]
        if u is None:
            return Acted(split(pi.mode()), memory, {g: {} for g in self.groups})
        actions, log_prob = pi.draw(u)
        if explore and self.learns and self.config.random_steps:
            random, even = random_draw(self.space, u, legal)
            actions, log_prob = random.where(self.warmup, actions), even.where(self.warmup, log_prob)
        return Acted(split(actions), memory, {g: {"log_prob": x} for g, x in split(log_prob).items()})

    # --- learning ---

    @abstractmethod
    def actor_loss(self, log_prob: Tensor, entropy: Tensor, batch: Minibatch) -> tuple[Tensor, Metrics]:
        """What the policy descends, a sum over active samples, less the weighted entropy; and means to log."""

    def set_schedules(self, now: Now) -> None:
        c = self.config
        if self._rate is not None and self._critic_rate is not None:
            self.actor_optimiser.rate.fill_(self._rate(now))
            if self.critic is not None:
                self.critic_optimiser.rate.fill_(self._critic_rate(now))
        self.entropy_weight.fill_(self._entropy(now))
        self.warmup.fill_(now.step < c.random_steps)
        self.learning.fill_(now.step >= c.learning_starts)

    def _set_rate(self, rate: Tensor) -> None:
        """Of both, in proportion: a rate that adapts is one for both."""
        self.actor_optimiser.rate.copy_(rate)
        if self.critic is not None:
            self.critic_optimiser.rate.copy_(rate * (self.critic_rate / self.config.lr))

    @torch.no_grad()
    def prepare(self, samples: Samples) -> tuple[Minibatch, Metrics]:
        """The whole rollout as one minibatch, with values, advantages and targets, and what is to be logged of them."""
        self.train_mode(False)
        active, valued = samples.active, samples.valued
        if self.spec.turns and samples.unsettled is not None:
            active = valued = samples.active_mask & ~samples.unsettled
        inputs = samples.actor_input, samples.critic_input
        batch = Minibatch(*inputs, samples.action, samples.extra("log_prob"), samples.legal, active, valued)
        batch.value, value_tp1, after = self._unroll_values(samples)
        if self.recurrent:
            add_memory(self, batch, samples, after)
        known = (batch.value, value_tp1) if self.target is None else None
        return batch, self.compute_advantages(samples, batch, known, first=True)

    @torch.no_grad()
    def compute_advantages(self, samples: Samples, batch: Minibatch, known: Any = None, first: bool = False) -> Metrics:
        """Advantages and targets by the critic of now, or by its slow copy, written into the batch. `known`: the values of
        these frames and of the next, if they are. The `first` time the statistics of rewards and returns move."""
        c, norm = self.config, self.value_norm
        self.train_mode(False)
        value, value_tp1 = known or self._unroll_values(samples, self.target)[:2]
        if first and self.reward_norm is not None:
            self.reward_norm.update(samples.scaled_reward, samples.reward_mask)
        value, value_tp1 = self.denormalised(value), self.denormalised(value_tp1)
        ends = samples.terminated, samples.cut
        advantage = gae(samples.reward, value, value_tp1, *ends, c.gamma, c.lam, *samples.turns, self.kernels)
        target = advantage + value
        batch.advantage = self.normalised(advantage, batch.active)
        metrics = {"explained_variance": losses.explained_variance(value, target, batch.valued)}
        if norm is not None and first:
            norm.update(target, batch.valued)
        batch.target = target if norm is None else norm.normalise(target)
        return metrics

    def normalised(self, advantage: Tensor, active: Tensor | None) -> Tensor:
        scope = self.config.advantage_scope
        if scope in ("none", "batch"):
            return advantage
        return losses.normalise(advantage, active, (0, 1) if scope == "agent" else None)

    def minibatches(
        self, batch: Minibatch, count: int = 1, order: Tensor | None = None, memories: bool = False
    ) -> list[Minibatch]:
        """So many of them: [chunk, so many chunks, N, ...], with the memory before each chunk, [so many chunks, N, ...]; with
        `memories` before each step of it."""
        steps, rows = batch.value.shape[:2]
        if order is None and (not self.recurrent or self.chunk == steps):
            return [batch if memories else batch.with_first_memory()]
        return minibatches(batch, steps, rows, self.chunk, count, order, memories)

    def update_minibatch(self, batch: Minibatch, keep: Tensor | None) -> tuple[Metrics, Tensor | None]:
        """One step of actor and critic on one minibatch; the actor's is taken where `keep` holds (none: always). Returns
        metrics, and `keep` for the next one: false once the KL stop was met."""
        c = self.config
        self.train_mode(True)
        seen = batch.critic_input if self.shared else batch.actor_input
        pi, value, _ = self.actor.unroll(seen, batch.legal, *batch.memory_of("actor"))
        log_prob, entropy = pi.log_prob_and_entropy(batch.action)
        if c.advantage_scope == "batch":
            batch = replace(batch, advantage=losses.normalise(batch.advantage, batch.active))
        loss, metrics = self.actor_loss(log_prob, entropy, batch)
        metrics["entropy_loss"] = -self.entropy_weight * metrics["entropy"]
        if self.metric_agents is not None:
            lost = {"entropy_loss": -self.entropy_weight * entropy}
            metrics |= losses.agent_sums(lost, batch.active, self.metric_agents)
        if isinstance(self.space, Box):
            metrics["std"] = self.actor.log_std.detach().exp().mean()
        if self.kl_stop is not None:
            keep = self._stop_beyond(self.kl_stop, keep, metrics)
        count = losses.active_count(log_prob, batch.active)
        if value is not None:
            return {**metrics, **self._update_both(loss, count, value, batch, keep)}, keep
        metrics["grad_norm_actor"] = self.actor_optimiser.descend(loss, count, keep)
        if not self.slices:  # the KL stop does not stop the critic
            metrics |= self.update_critic(batch, self.learning if c.learning_starts else None)[0]
        return metrics, keep

    def _stop_beyond(self, kl: float, keep: Tensor | None, metrics: Metrics) -> Tensor:
        """The KL stop; there is none during the random warm-up."""
        assert keep is not None
        keep = keep & (self.warmup | (metrics["kl"] <= kl))
        metrics["kept"] = keep.float()
        return keep

    def _update_both(self, loss: Tensor, count: Any, value: Tensor, batch: Minibatch, keep: Tensor | None) -> Metrics:
        """One step for actor and critic, where they share a trunk."""
        value_loss, metrics, value_count = self.critic_loss(value, batch)
        if value_count is not count and batch.active is not None:  # two means, of unequal numbers
            loss = loss * (value_count / count.clamp(min=1))
        norm = self.actor_optimiser.descend(loss + value_loss, value_count, keep)
        return {"grad_norm": norm, **metrics}

    def update_critic(self, batch: Minibatch, keep: Tensor | None) -> tuple[Metrics, Tensor, Any]:
        """One step of the critic; its metrics, the values before it, and how many were learnt."""
        assert self.critic is not None
        value, _ = self.critic.value(batch.critic_input, *batch.memory_of("critic"))
        loss, metrics, count = self.critic_loss(value, batch)
        return {**metrics, "grad_norm_critic": self.critic_optimiser.descend(loss, count, keep)}, value.detach(), count

    def critic_loss(self, value: Tensor, batch: Minibatch) -> tuple[Tensor, Metrics, Any]:
        """The sum of the values' errors, their mean, and how many they are."""
        c, mask = self.config, batch.valued
        how = self.value_clip, c.huber, self.kernels, self.metric_agents
        loss, metrics = losses.value(value, batch.value, batch.target, mask, *how)
        return loss if c.value_weight == 1 else loss * c.value_weight, metrics, losses.active_count(value, mask)

    @torch.no_grad()
    def finish(self, samples: Samples, steps: list[Metrics], metrics: Metrics) -> Metrics:
        """The target follows, the statistics of observations move; means over the steps, for the log."""
        if self.target is not None:
            torch._foreach_lerp_(list(self.target.parameters()), list(self.value_net.parameters()), self.config.target_tau)
            for mine, theirs in zip(self.target.buffers(), self.value_net.buffers(), strict=True):
                mine.copy_(theirs)
        self.observations.update(samples.batch.frame, samples.batch.filled)
        return {**losses.mean_of_steps(steps), **metrics, "learning_rate": self.actor_optimiser.rate.clone()}

    # --- values ---

    @property
    def value_net(self) -> Any:
        """What values frames: the critic, or the actor where they share a trunk."""
        return self.actor if self.critic is None else self.critic

    def values(self, frame: Frame) -> Tensor:
        return self.denormalised(in_slabs(self.value_net.value, self.observations.critic_input(frame))[0])

    def _unroll_values(self, samples: Samples, net: Any = None) -> tuple[Tensor, Tensor, Any]:
        """V of all frames and of the true next ones, by the critic or another `net`, and its memory after each frame. Without
        memory it is evaluated in slabs of bounded size."""
        critic, name = net or self.critic or self.actor, "actor" if self.critic is None else "critic"
        value, memory = (critic.value, samples.memory[name]) if self.recurrent else (partial(in_slabs, critic.value), None)
        value_t, after = samples.unroll(value, samples.critic_input, memory)
        return value_t, samples.after(value, samples.next_critic_input, after)[0], after

    def denormalised(self, value: Tensor) -> Tensor:
        return value if self.value_norm is None else self.value_norm.denormalise(value)

    def train_mode(self, on: bool) -> None:
        """For modules of the user's own; ours know no modes."""
        if self.net.module is not None:
            self.train(on)
