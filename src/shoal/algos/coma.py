"""COMA (Foerster et al., 2018, https://arxiv.org/abs/1705.08926): policy gradients with a counterfactual baseline.

A central critic gives Q of each of an agent's choices, with the others' actions as they were. An agent's advantage is Q of what
it did, less the mean of Q under its policy:

    A_i = Q(s, u) - sum_a pi_i(a) Q(s, (u_-i, a)),    L = -A_i log pi_i(u_i) - w H(pi_i)

so that each is told what it added itself. The critic sees the state, the agent's own observation, the others' actions (its own
are blanked: they are what it puts out), everybody's last actions and the agent's id, and learns towards TD(lambda) returns
of a target critic at the actions that were taken next (SARSA); where an episode was cut off, or the rollout ends, at actions
that the policy would draw there. One instance plays all groups of its team, unlike ones too; other teams are seen
through the state. Agents are paid alike: their team's mean reward, if need be (`--reward`).

Knobs, and what they do

  Experience. All rows act for `rollout` steps, or so many whole `episodes` of each (those that end early as in `algos/ppo.py`),
  and one step is made on all of it: it wants many rows. `replay` 2000 keeps so many episodes instead and learns from `batch`
  of them at a time, one update for as many environment steps as a batch has unless `every` says otherwise. That uses data
  longer, at a cost: the gradient takes them for episodes of the present policy, which they are not, and nothing corrects for
  it.

  The policy. What acts is (1 - epsilon) pi + epsilon uniform, from `epsilon` to `epsilon_last` over `epsilon_steps`: a floor
  that is part of the policy while it learns, in the gradient and in the baseline as well. `entropy` is a bonus, with a
  schedule. `last_action` shows an agent what it did last. `--net.memory gru` gives actors and critics a memory.

  The critic. `lam` mixes returns of all lengths. `after_death` as in `algos/ppo.py`: a return goes on with the team after an
  agent's death (auto, team) or ends with it (own); the dead see zeros and have one choice, the first. `target_every` 200 and
  `target_tau` 1 copy it every 200 of its steps; 1 and 0.01 let the copy follow smoothly. `critic_slices` 0 makes one step on
  the whole rollout, k as many in slices of time, the last first, as the paper's code does (`rollout` of them is a step at a
  time). Few steps are what it lacks: half an episode a rollout ended simple_spread at -15.9 after 2M steps, a whole one at
  -17.5. Advantages are of the values before each step. `advantage_scope` normalises them over the rollout, for all or for
  each agent.

  The rest as in `algos/ppo.py`.

Metrics, for each group

    policy_loss          the loss above, without the entropy
    entropy              of the policy with its floor, in nats
    advantage            mean of its absolute value
    epsilon              share of uniform choice now
    critic_loss          of the critics
    td_error             mean |G - Q|
    q                    mean value of the actions that were taken
    target_lag           how far the target is behind: norm of the difference over that of the weights
    learning_rate        of the actors
    grad_norm_actor      before clipping
    grad_norm_critic     before clipping

Departures from the paper: the critic's values and advantages are apart (`dueling`), for a choice that is seldom made would else
keep the value of days gone by; returns are normalised, also under the target, which lags; AdamW with an epsilon of 1e-5
instead of RMSprop; rollouts need not be whole episodes, for what is cut off is bootstrapped; actions of several dimensions are
worth the mean of their choices' values. On simple_spread agents want nets of their own: -14.7 at 4.5M steps with `--net.share
none`, -18.0 with one net and all else the same. Scores and their commands: `benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.base import Acted, Algorithm, LearnerConfig, Replay, Rollout, Seat, StateConfig, rollout_of
from shoal.algos.checks import bounded
from shoal.algos.observations import Observations, scope_width
from shoal.algos.samples import Samples
from shoal.algos.target import Target
from shoal.buffers.minibatches import spans
from shoal.nets.encoders import WithLastAction
from shoal.nets.heads import Actor
from shoal.nets.norm import Running
from shoal.nets.own import normaliser
from shoal.nets.parts import images_of, vector_width
from shoal.nets.qnets import QNetwork
from shoal.ops import losses, values
from shoal.ops.distributions import Choice
from shoal.ops.explore import floored
from shoal.ops.returns import td_lambda
from shoal.ops.schedules import Now
from shoal.spec import Batch, Frame, UserError
from shoal.tree import split_groups, tree_map

TINY = 1e-10  # what is illegal has no probability, and its logarithm is not asked for
Metrics = dict[str, Tensor]
Actions = dict[str, Tensor]  # group -> one-hot [..., N, A], zeros of those who did not act


class COMA(Algorithm):
    takes = ("discrete", "multi-discrete")
    value_metric = "q"
    reward, turns, unit = "common", False, "team"
    net_defaults = {"hidden": (128, 128), "activation": "relu", "gain": 1.0, "share": "none"}

    @dataclass(frozen=True)
    class Config(StateConfig, LearnerConfig):
        rules: ClassVar[defaults.Rules] = {
            **LearnerConfig.rules,
            "rollout": defaults.half_episode,
            "epsilon_steps": defaults.quarter,
        }

        rollout: int | None = None  # steps between updates; none: half an episode's where it lasts at most 50, else 64
        episodes: int | None = (
            None  # instead of `rollout`: whole episodes of every row; steps after those that end early are left out
        )
        replay: int = 0  # learn from so many recent episodes (of the longest length) instead of the last rollout: biased
        batch: int = 16  # episodes an update, with `replay`
        every: float | None = None  # environment steps for each update, with `replay`; none: as many as a batch has
        lam: float = 0.8  # TD(lambda)
        epsilon: float = 0.5  # share of uniform choice in the policy, at first
        epsilon_last: float = 0.01  # and at last
        epsilon_steps: int | None = None  # environment steps until then; flat from there on; none: a quarter of the run
        epsilon_schedule: str = "linear"  # constant, linear, cosine, exponential, or module:Class
        entropy: float = 0.03  # weight of the entropy bonus
        entropy_schedule: str = "constant"  # as lr_schedule
        entropy_last: float = 0.0  # share of the entropy weight that its schedule ends at
        last_action: bool = True  # agents see what they did last
        advantage_scope: Literal["none", "group", "agent"] = "group"  # normalised over what
        dueling: bool = True  # the critic's values and advantages apart, so that choices seldom made keep up with the others
        critic_slices: int = 5  # steps of the critic, over slices of time, the last first; 0: one over all
        target_every: int = 20  # steps of the critic between those of its target
        target_tau: float = 1.0  # share by which it follows; 1: copied
        lr: float = 1e-3  # learning rate
        lr_critic: float | None = None  # learning rate of the critic; none: the same
        normalise_value: bool = True  # the critic learns returns of mean 0 and deviation 1

        def __post_init__(self) -> None:
            super().__post_init__()
            shares = dict.fromkeys(("lam", "epsilon", "epsilon_last", "entropy_last", "target_tau"), (0.0, 1.0))
            counts = dict.fromkeys(("replay", "entropy", "critic_slices"), (0.0, 1e30))
            bounded(self, {**shares, **counts}, ("episodes", "batch", "every", "epsilon_steps", "target_every", "lr_critic"))

    epsilon: Tensor
    entropy_weight: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c, spec, net, groups, generator = self.config, self.spec, self.net, self.groups, seat.generator
        if net.trunk == "shared":
            raise UserError("--net.trunk shared does not go with COMA, whose critic sees what its actors do not.")
        if net.attention != "none":
            raise UserError("--net.attention does not go with COMA, whose critic takes actions beside what is seen.")
        if any(images_of(g.obs) for g in spec.groups):
            raise UserError("COMA's critic takes numbers, and agents see pictures here: take mappo.")
        self.feed = self._feed()
        self.spaces: dict[str, Any] = {g: spec[g].action for g in groups}
        self.sizes = {g: spec[g].n * sum(self.spaces[g].sizes) for g in groups}  # numbers of a group's actions, one-hot
        self.noise = max(sum(s.sizes) for s in self.spaces.values())
        self.observations = nn.ModuleDict({g: Observations(self, "world", "agent", (g,)) for g in groups})
        self.actors = nn.ModuleDict({g: self._actor(g, generator) for g in groups})
        self.critics = nn.ModuleDict({g: self._critic(g, generator) for g in groups})
        self.value_norm = normaliser(c.normaliser)() if c.normalise_value else None
        self.reward_norm = Running() if c.normalise_reward else None
        self._rate, self._entropy = self.schedule("lr"), self.schedule("entropy")
        self._epsilon = self.schedule("epsilon", last=c.epsilon_last)
        self.register_buffer("epsilon", torch.tensor(c.epsilon))
        self.register_buffer("entropy_weight", torch.tensor(c.entropy))
        for g, x in self._others().items():
            self.register_buffer(f"others_{g}", x, persistent=False)
        self.place(seat.device)
        self.actor_optimiser = self.make_optimiser([self.actors], c.lr)
        rate = c.lr_critic or c.lr
        self._critic_rate = self.schedule("lr", rate, rate * c.lr_last)
        self.critic_optimiser = self.make_optimiser([self.critics], rate)
        self.target = Target(self.critics, self.critic_optimiser, c.target_every, c.target_tau)

    def _feed(self) -> Rollout | Replay:
        c, horizon, rollout = self.config, self.spec.horizon, rollout_of(self.config, self.spec)
        if not c.replay:
            return rollout
        if horizon is None:
            raise UserError("--algo.replay needs a world whose episodes have a longest length: leave it.")
        self.remark = (
            f"COMA learns from {c.replay:,} recent episodes as if its present policy had played them: it uses them longer, "
            "and its gradient is biased."
        )
        episodes = c.batch * horizon  # the environment steps of a batch
        return Replay(c.batch, horizon, episodes, c.every or episodes, c.replay * horizon, rollout.steps, whole=True)

    def _others(self) -> dict[str, Tensor]:
        """For each group [N, all numbers of all actions]: zero at an agent's own, so that its critic does not see them."""
        out, at, width = {}, 0, sum(self.sizes.values())
        for g, size in self.sizes.items():
            n = self.spec[g].n
            out[g] = torch.ones(n, width)
            for i in range(n):
                out[g][i, at + i * size // n : at + (i + 1) * size // n] = 0
            at += size
        return out

    def _actor(self, g: str, generator: torch.Generator) -> Actor:
        encoder: Any = self._observations(g).encoder(generator)
        encoder = WithLastAction(encoder, sum(self.spaces[g].sizes)) if self.config.last_action else encoder
        return Actor(encoder, self.spaces[g], self.spec[g].agents, self.net, generator)

    def _critic(self, g: str, generator: torch.Generator) -> QNetwork:
        net = replace(self.net, hidden=self.net.critic_hidden or self.net.hidden)
        width = scope_width(self.spec, (g,), "world") + vector_width(self.spec[g].obs) + 2 * sum(self.sizes.values())
        return QNetwork(width, self.spaces[g], self.spec[g].agents, net, generator, self.config.dueling)

    def _observations(self, g: str) -> Observations:
        return self.observations[g]  # type: ignore[return-value]

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {"actor": self.actors, "critic": self.critics, "target_critic": self.target.module}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for g in self.groups:
            nets: Any = {"actor": self.actors[g], "critic": self.critics[g]}
            out[g] = {k: m.net.zero_memory(rows, device) for k, m in nets.items() if self.recurrent}
            out[g]["last"] = torch.zeros(rows, self.spec[g].n, sum(self.spaces[g].sizes), device=device)
        return out

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        actions, after, last = {}, {}, {g: memory[g]["last"] for g in self.groups}
        active = {g: self.remembers(frame[g]) if self.recurrent and self.has_inactive else None for g in self.groups}
        for g in self.groups:
            view, seen = frame[g], self._actor_sees(self._observations(g).actor_input(frame), last[g])
            pi, state = self._policy(g, view.legal)(seen, memory[g].get("actor"), None, active[g])
            floor = self.epsilon if explore and self.learns else torch.zeros_like(self.epsilon)
            actions[g] = pi.mode() if noise is None else self._draw(g, pi, view.legal, noise[g], floor)
            taken = values.one_hot(actions[g], self.spaces[g]) * view.active[..., None]
            after[g] = {**memory[g], **({"actor": state} if self.recurrent else {}), "last": taken}
        if self.recurrent and explore and self.groups == self.bound:  # who learns carries the critics' memory too
            taken_by = {g: after[g]["last"] for g in self.groups}
            for g in self.groups:
                sees = self._critic_sees(self._observations(g).critic_input(frame), g, taken_by, last)
                after[g]["critic"] = self.critics[g](sees, memory[g]["critic"], None, active[g])[1]
        return Acted(actions, after, {g: {} for g in self.groups})

    def _actor_sees(self, obs: Any, last: Tensor) -> Any:
        return (obs, last) if self.config.last_action else obs

    def _policy(self, g: str, legal: Tensor | None) -> Any:
        """An actor as a function (input, memory...) -> its distribution, without the floor, and its memory after."""
        actor: Any = self.actors[g]

        def policy(x: Any, *memory: Any) -> tuple[Choice, Any]:
            pi, _, after = actor.unroll(x, legal, *memory)
            return pi, after

        return policy

    def _draw(self, g: str, pi: Choice, legal: Tensor | None, noise: Tensor, floor: Tensor) -> Tensor:
        space = self.spaces[g]
        chance = floored(pi.probabilities(), floor, space, legal).clamp(min=TINY).log()
        return Choice(chance, space.sizes, legal, space.shape == ()).sample(noise[..., : chance.shape[-1]])

    def _critic_sees(self, seen: Tensor, g: str, taken: Actions, last: Actions) -> Tensor:
        """Of a group's critic: state and own observation, the others' actions, everybody's last ones."""
        n = self.spec[g].n
        every, before = (torch.cat([x[h].flatten(-2) for h in self.groups], -1)[..., None, :] for x in (taken, last))
        others = every * getattr(self, f"others_{g}")
        return torch.cat((seen, others, before.expand(*before.shape[:-2], n, -1)), -1)

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        return steps * rows * sum(self.sizes.values())

    def set_schedules(self, now: Now) -> None:
        c = self.config
        self.actor_optimiser.rate.fill_(self._rate(now))
        self.critic_optimiser.rate.fill_(self._critic_rate(now))
        self.entropy_weight.fill_(self._entropy(now))
        self.epsilon.fill_(self._epsilon(Now(now.step, c.epsilon_steps, now.updates)))

    def update_statistics(self, batch: Batch) -> None:
        self._update_reward_norm(Samples(self, replace(batch, filled=None)))
        for g in self.groups:
            self._observations(g).update(batch.frame)

    def _update_reward_norm(self, samples: Samples) -> None:
        """Unlike the other families, group by group: the statistics of several groups are merged in their order."""
        if self.reward_norm is not None:
            for g in self.groups:
                self.reward_norm.update(samples.batch.learner_reward[g], samples[g].reward_mask)

    def update(self, samples: Samples) -> Metrics:
        did, views = samples.later.actions, samples.frame
        taken = {g: values.one_hot(did[g], self.spaces[g]) * views[g].active[..., None] for g in self.groups}
        last = {g: self._last_action(samples[g], taken[g]) for g in self.groups}
        policies, after = {}, {}
        for g in self.groups:
            part, memory = samples[g], samples[g].memory["actor"] if self.recurrent else None
            sees = self._actor_sees(part.actor_input, last[g])
            policies[g], after[g] = part.unroll(self._policy(g, part.legal), sees, memory)
        if isinstance(self.feed, Rollout):
            self._update_reward_norm(samples)  # rewards are new; observation statistics move after the update
        with torch.no_grad():
            sees_t = {g: self._critic_sees(samples[g].critic_input, g, taken, last) for g in self.groups}
            target = self._returns(samples, sees_t, taken, after)
            valued = samples.active_mask if samples.valued is None else samples.valued
            if self.value_norm is not None:
                each, masks = (split_groups(self.spec, self.groups, x, 2) for x in (target, valued))
                for g in self.groups:
                    self.value_norm.update(each[g], masks[g])
                target = self.value_norm.normalise(target)
        q, metrics = self._update_critics(samples, sees_t, target, valued)
        metrics |= self._update_actors(samples, policies, taken, q)
        if isinstance(self.feed, Rollout):
            for g in self.groups:
                self._observations(g).update(samples.batch.frame, samples.batch.filled)
        return {
            **metrics,
            "epsilon": self.epsilon.clone(),
            "target_lag": self.target.lag(),
            "learning_rate": self.actor_optimiser.rate.clone(),
        }

    def _last_action(self, part: Samples, taken: Tensor) -> Tensor:
        """[T, B, N, A] what agents did the step before; nothing where they start."""
        return torch.cat((part.memory["last"][None], taken[:-1])).masked_fill(part.start[..., None], 0)

    def _returns(self, samples: Samples, sees: Actions, taken: Actions, after: dict[str, Any]) -> Tensor:
        """[T, B, N] TD(lambda) returns of the target critics, of all groups."""
        next_seen, next_own = self._next_actions(samples, taken, after)
        targets: Any = self.target.module
        values_tp1 = []
        for g in self.groups:
            part, state = samples[g], None
            if self.recurrent:
                _, state = part.unroll(targets[g], sees[g], part.memory["critic"])
            sees_tp1 = self._critic_sees(part.next_critic_input, g, next_seen, taken)
            q, _ = part.after(targets[g], sees_tp1, state)
            values_tp1.append(self._denormalised(values.expected(q, next_own[g], self.spaces[g])))
        value_tp1 = torch.cat(values_tp1, 2)
        return td_lambda(samples.reward, value_tp1, samples.terminated, samples.cut, self.config.gamma, self.config.lam)

    def _next_actions(self, samples: Samples, taken: Actions, after: dict[str, Any]) -> tuple[Actions, Actions]:
        """[T, B, N, A] what was done in the next frames; what would be drawn there, where nothing was done any more. As the
        others see it, and as it is for an agent's own value: one that is cut off alone is gone for the others."""
        assert samples.noise is not None
        noise = samples.noise.split([samples.batch.over.numel() * n for n in self.sizes.values()])
        seen, own = {}, {}
        ends = samples.cut.clone()
        ends[-1] = True
        for (g, hot), end, u in zip(taken.items(), split_groups(self.spec, self.groups, ends, 2).values(), noise, strict=True):
            part, view = samples[g], samples.next_frame[g]
            pi, _ = part.after(self._policy(g, view.legal), self._actor_sees(part.next_actor_input, hot), after[g])
            drawn = values.one_hot(self._draw(g, pi, view.legal, u.reshape(hot.shape), self.epsilon), self.spaces[g])
            nothing = end | ~view.alive
            own[g] = torch.where(nothing[..., None], drawn, torch.cat((hot[1:], hot[-1:])))
            seen[g] = own[g] * view.alive[..., None]
        return seen, own

    def _denormalised(self, value: Tensor) -> Tensor:
        """Values in the units of the rewards that are learnt from."""
        return value if self.value_norm is None else self.value_norm.denormalise(value)

    def _update_critics(
        self, samples: Samples, sees: Actions, target: Tensor, valued: Tensor
    ) -> tuple[dict[str, Tensor], Metrics]:
        """The critics' steps. Returns Q before each of them, [T, B, N, A], and means over all samples."""
        c, pieces = self.config, spans(len(target), max(self.config.critic_slices, 1))
        memory = {g: self._memory_before(samples[g], g, sees[g], [a for a, _ in pieces]) for g in self.groups}
        own = {g: values.one_hot(samples[g].action, self.spaces[g]) for g in self.groups}
        predicted: dict[str, list[Tensor]] = {g: [] for g in self.groups}
        metrics: list[Metrics] = []
        counts: list[Tensor] = []
        for k, (a, b) in reversed(list(enumerate(pieces))):
            taken = []
            for g in self.groups:
                part = samples[g]
                when = tree_map(lambda x: x[a:b], (part.start, part.remembers)) if self.recurrent else ()  # noqa: B023
                q, _ = self.critics[g](sees[g][a:b], memory[g][k], *when)
                predicted[g].append(q.detach())
                taken.append(values.expected(q, own[g][a:b], self.spaces[g]))
            value, goal, mask = torch.cat(taken, 2), target[a:b], valued[a:b]
            error, count = losses.value_error(value, goal, c.huber), mask.sum()
            norm = self.critic_optimiser.descend(losses.masked_sum(error, mask), count)
            self.target.follow(count > 0)
            value = value.detach()
            each = {"critic_loss": error, "td_error": (goal - value).abs(), "q": self._denormalised(value)}
            metrics.append({**self.metric_means(each, mask), "grad_norm_critic": norm})
            counts.append(count)
        q_t = {g: self._denormalised(torch.cat(xs[::-1])) for g, xs in predicted.items()}
        return q_t, losses.weighted_means(metrics, counts)

    @torch.no_grad()
    def _memory_before(self, part: Samples, g: str, sees: Tensor, begins: list[int]) -> list[Any]:
        """The critic's memory before each of these steps."""
        first = part.memory["critic"] if self.recurrent else None
        if begins == [0] or not self.recurrent:
            return [first] * len(begins)
        _, after = part.unroll(self.critics[g], sees, first)
        return [first if a == 0 else tree_map(lambda x, a=a: x[a - 1], after) for a in begins]

    def _update_actors(self, samples: Samples, policies: dict[str, Choice], taken: Actions, q: dict[str, Tensor]) -> Metrics:
        total, counts, metrics = [], [], []
        scope = self.config.advantage_scope
        for g in self.groups:
            space, mask = self.spaces[g], samples[g].active_mask
            pi = floored(policies[g].probabilities(), self.epsilon, space, samples[g].legal)
            log_pi = pi.clamp(min=TINY).log()
            advantage = values.counterfactual(q[g], pi.detach(), taken[g], space)
            if scope != "none":
                advantage = losses.normalise(advantage, mask, (0, 1) if scope == "agent" else None)
            loss, entropy = -advantage * (log_pi * taken[g]).sum(-1), -(pi * log_pi).sum(-1)
            total.append(losses.masked_sum(loss - self.entropy_weight * entropy, mask))
            counts.append(mask.sum())
            each = {"policy_loss": loss, "entropy": entropy, "advantage": advantage.abs()}
            metrics.append(losses.means(each, mask, self.metric_agents and self.spec[g].n))
        count = torch.stack(counts).sum()
        norm = self.actor_optimiser.descend(torch.stack(total).sum(), count)
        apart = {k: torch.cat([m.pop(k) for m in metrics], 1) for k in list(metrics[0]) if k.endswith(losses.EACH)}
        return {**losses.weighted_means(metrics, counts), **apart, "grad_norm_actor": norm}

    def values(self, frame: Frame) -> Tensor:
        """The last actions are taken to be the same as those of now."""
        last, chance, chosen, parts = {}, {}, {}, []
        for g, space in self.spaces.items():
            none = torch.zeros(*frame[g].active.shape, sum(space.sizes), device=frame[g].active.device)
            pi, _ = self._policy(g, frame[g].legal)(self._actor_sees(self._observations(g).actor_input(frame), none))
            chance[g] = floored(pi.probabilities(), self.epsilon, space, frame[g].legal)
            chosen[g] = values.one_hot(pi.mode(), space)
            last[g] = chosen[g].masked_fill(frame[g].start[..., None], 0)
        for g, space in self.spaces.items():
            q, _ = self.critics[g](self._critic_sees(self._observations(g).critic_input(frame), g, chosen, last))
            parts.append(self._denormalised(values.expected(q, chance[g], space)))
        return torch.cat(parts, 2)
