"""COMA (Foerster et al., 2018, https://arxiv.org/abs/1705.08926): policy gradients with a counterfactual baseline.

A central critic says what each of an agent's choices is worth beside what the others did. An agent's advantage is what it did,
less what its policy would have been worth, with the others' actions as they were:

    A_i = Q(s, u) - sum_a pi_i(a) Q(s, (u_-i, a)),    L = -A_i log pi_i(u_i) - w H(pi_i)

so that each is told what it added itself. The critic sees the state, the agent's own observation, the others' actions (its own
are blanked: they are what it puts out), everybody's last actions and the agent's id, and learns towards TD(lambda) returns
of a target critic at the actions that were taken next (SARSA); where an episode was cut off, or the rollout ends, at actions
that the policy would draw there. One instance plays all groups of its team, unlike ones too; other teams are seen
through the state. Agents must be paid alike: `--reward team-mean` makes it the mean over the team's agents.

Knobs, and what they do

  Experience. All rows act for `rollout` steps, or so many whole `episodes`, and one step is made on all of it: it wants many
  rows. `replay` 2000 keeps so many episodes instead and learns from `batch` of them at a time, one update for as many
  environment steps as a batch has unless `every` says otherwise. That uses data longer, at a cost: the gradient takes them
  for episodes of the present policy, which they are not, and nothing corrects for it.

  The policy. What acts is (1 - epsilon) pi + epsilon uniform, from `epsilon` to `epsilon_last` over `epsilon_steps`: a floor
  that is part of the policy while it learns, in the gradient and in the baseline as well. `entropy` is a bonus, with a
  schedule. `last_action` shows an agent what it did last. `--net.memory gru` gives actors and critics a memory.

  The critic. `lam` mixes returns of all lengths. `after_death` as in `algos/ppo.py`: a return goes on with the team after an
  agent's death (auto, team) or ends with it (own); the dead see zeros and have one choice, the first. `target_every` 200 and
  `target_tau` 1 copy it every 200 of its steps; 1 and 0.01 let the copy follow smoothly. `critic_slices` 0 makes one step on
  the whole rollout, k as many in slices of time, the last first, as the paper's code does (`rollout` of them is a step at a
  time). Advantages are of the values before each step. `advantage_scope` normalises them over the rollout, for all or for each
  agent.

  The rest as in `algos/ppo.py`.

Metrics, for each group

    policy_loss     the loss above, without the entropy;    entropy  of the policy with its floor, in nats
    advantage       mean of its absolute value;             epsilon  now
    critic_loss     what the critics descend;               td_error  mean |G - Q|
    q               mean value of the actions that were taken
    target_lag      how far the target is behind: norm of the difference over that of the weights
    learning_rate   of the actors;                          grad_norm_actor, grad_norm_critic  before clipping

Departures from the paper: the critic's values and advantages are apart (`dueling`), for a choice that is seldom made would else
keep the value of days gone by; returns are normalised, also under the target, which lags; AdamW with an epsilon of 1e-5
instead of RMSprop; rollouts need not be whole episodes, for what is cut off is bootstrapped; actions of several dimensions are
worth the mean of their choices' values. On simple_spread agents want nets of their own: -14.7 at 4.5M steps with `--net.share
none`, -18.0 with one net and all else the same. Scores and their commands: `benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos.base import AfterDeath, Algorithm, Optimiser, Replay, Rollout, Target, bounded
from shoal.algos.observations import Observations, scope_width
from shoal.buffers.minibatches import spans
from shoal.nets.encoders import Beside, images_of, vector_width
from shoal.nets.heads import Actor, QNetwork
from shoal.nets.layers import NetConfig
from shoal.nets.norm import Running, normaliser
from shoal.ops import losses, schedules, values
from shoal.ops.distributions import Choice
from shoal.ops.explore import floored
from shoal.ops.returns import td_lambda
from shoal.ops.schedules import Now
from shoal.spec import Batch, EnvSpec, Frame, UserError, tree_map, where_rows

TINY = 1e-10  # what is illegal has no probability, and its logarithm is not asked for


class COMA(Algorithm):
    takes = ("discrete", "multi-discrete")
    pay, turns, unit = "common", False, "team"

    @dataclass(frozen=True)
    class Config:
        rollout: int = 25  # steps between updates
        episodes: int | None = None  # instead of `rollout`: so many times the longest an episode can be
        replay: int = 0  # learn from so many recent episodes (of the longest length) instead of the last rollout: biased
        batch: int = 16  # episodes an update, with `replay`
        every: float | None = None  # environment steps for each update, with `replay`; none: as many as a batch has
        gamma: float = 0.95  # discount
        lam: float = 0.8  # TD(lambda)
        time_limit: bool = True  # bootstrap where an episode was cut off; false: as if it had terminated
        after_death: AfterDeath = "auto"  # a return ends with its team's episode (auto, team) or with the agent (own)
        epsilon: float = 0.5  # share of uniform choice in the policy, at first
        epsilon_last: float = 0.01  # and at last
        epsilon_steps: int = 500_000  # environment steps until then; flat from there on
        epsilon_schedule: str = "linear"  # constant, linear, cosine, exponential, or module:Class
        entropy: float = 0.01  # weight of the entropy bonus
        entropy_schedule: str = "constant"  # as lr_schedule
        entropy_last: float = 0.0  # share of the entropy weight that its schedule ends at
        last_action: bool = True  # agents see what they did last
        advantage_scope: Literal["none", "group", "agent"] = "none"  # normalised over what
        dueling: bool = True  # the critic's values and advantages apart, so that choices seldom made keep up with the others
        critic_slices: int = 0  # steps of the critic, over slices of time, the last first; 0: one over all
        target_every: int = 200  # steps of the critic between those of its target
        target_tau: float = 1.0  # share by which it follows; 1: copied
        huber: float | None = None  # errors of the critic beyond this count linearly; none: squared errors
        lr: float = 5e-4  # learning rate
        lr_critic: float | None = None  # learning rate of the critic; none: the same
        lr_schedule: str = "constant"  # linear, cosine, exponential, exponential:0.999/update or /step, module:Class
        lr_last: float = 0.0  # share of the learning rate that its schedule ends at
        weight_decay: float = 0.0  # decoupled, as in AdamW
        grad_clip: float | None = 10.0  # norm beyond which gradients are scaled down; none: never
        normalise_obs: bool = True  # observations and states of mean 0 and deviation 1, by running statistics
        normalise_value: bool = True  # the critic learns returns of mean 0 and deviation 1
        normalise_reward: bool = False  # rewards divided by their running root mean square
        normaliser: str | None = None  # your own in place of the running one: package.module:Class or file.py:Class
        reward_scale: float = 1.0  # rewards are multiplied by it before anything is learnt; reported returns stay raw
        shaper: str | None = None  # your own function (reward, obs, step, steps) -> reward, as module:name or file.py:name

        def __post_init__(self) -> None:
            whole = ("rollout", "episodes", "batch", "every", "epsilon_steps", "target_every")
            shares = ("gamma", "lam", "epsilon", "epsilon_last", "entropy_last", "lr_last", "target_tau")
            bounds: dict[str, tuple[float, float]] = {
                **dict.fromkeys(shares, (0, 1)),
                **dict.fromkeys(("replay", "entropy", "critic_slices", "weight_decay"), (0, 1e30)),
            }
            bounded(self, bounds, (*whole, "lr", "lr_critic", "huber", "grad_clip", "reward_scale"))

    epsilon: Tensor
    entropy_weight: Tensor

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
            raise UserError("--net.trunk shared does not go with COMA, whose critic sees what its actors do not.")
        if net.attention != "none":
            raise UserError("--net.attention does not go with COMA, whose critic takes actions beside what is seen.")
        if any(images_of(g.obs) for g in spec.groups):
            raise UserError("COMA's critic takes numbers, and agents see pictures here: take mappo.")
        self.recurrent = net.memory != "none"
        self.feed = self._feed()
        self.spaces: dict[str, Any] = {g: spec[g].action for g in groups}
        self.sizes = {g: spec[g].n * sum(self.spaces[g].sizes) for g in groups}  # numbers of a group's actions, one-hot
        self.noise = max(sum(s.sizes) for s in self.spaces.values())
        make = normaliser(c.normaliser)
        see = partial(Observations, self, "world", "agent", net, c.normalise_obs, make, blank=self.returns_after_death)
        self.observations = nn.ModuleDict({g: see((g,)) for g in groups})
        self.actors = nn.ModuleDict({g: self._actor(g, generator) for g in groups})
        self.critics = nn.ModuleDict({g: self._critic(g, generator) for g in groups})
        self.value_norm = make() if c.normalise_value else None
        self.reward_norm = Running() if c.normalise_reward else None
        self._rate = schedules.make(c.lr_schedule, c.lr, c.lr * c.lr_last, "--algo.lr-schedule")
        self._weight = schedules.make(c.entropy_schedule, c.entropy, c.entropy * c.entropy_last, "--algo.entropy-schedule")
        self._epsilon = schedules.make(c.epsilon_schedule, c.epsilon, c.epsilon_last, "--algo.epsilon-schedule")
        self.register_buffer("epsilon", torch.tensor(c.epsilon))
        self.register_buffer("entropy_weight", torch.tensor(c.entropy))
        for g, x in self._own_actions().items():
            self.register_buffer(f"others_{g}", x, persistent=False)
        self.to(device)
        self.actor_optimiser = Optimiser([self.actors], c.lr, c.weight_decay, c.grad_clip)
        self.critic_optimiser = Optimiser([self.critics], c.lr_critic or c.lr, c.weight_decay, c.grad_clip)
        self.target = Target(self.critics, self.critic_optimiser, c.target_every, c.target_tau)

    def _feed(self) -> Rollout | Replay:
        c, horizon = self.config, self.spec.horizon
        if (c.episodes or c.replay) and horizon is None:
            asked = "episodes" if c.episodes else "replay"
            raise UserError(
                f"--algo.{asked} needs a world whose episodes have a longest length: leave it, or give --algo.rollout."
            )
        steps = c.rollout if c.episodes is None else c.episodes * horizon
        if not c.replay:
            return Rollout(steps)
        assert horizon is not None
        self.remark = (
            f"COMA learns from {c.replay:,} recent episodes as if its present policy had played them: it uses them longer, "
            "and its gradient is biased."
        )
        episodes = c.batch * horizon  # the environment steps of a batch
        return Replay(c.batch, horizon, episodes, c.every or episodes, c.replay * horizon, steps, whole=True)

    def _own_actions(self) -> dict[str, Tensor]:
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
        encoder: Any = self._sight(g).encoder(generator)
        encoder = Beside(encoder, sum(self.spaces[g].sizes)) if self.config.last_action else encoder
        return Actor(encoder, self.spaces[g], self.spec[g].agents, self.net, generator)

    def _critic(self, g: str, generator: torch.Generator) -> QNetwork:
        net = replace(self.net, hidden=self.net.critic_hidden or self.net.hidden)
        width = scope_width(self.spec, (g,), "world") + vector_width(self.spec[g].obs) + 2 * sum(self.sizes.values())
        return QNetwork(width, self.spaces[g], self.spec[g].agents, net, generator, self.config.dueling)

    def _sight(self, g: str) -> Observations:
        return self.observations[g]  # type: ignore[return-value]

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {"actor": self.actors, "critic": self.critics, "target_critic": self.target.module}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for g in self.groups:
            nets: Any = {"actor": self.actors[g], "critic": self.critics[g]}
            out[g] = {k: m.net.memory.zero(rows, device) for k, m in nets.items() if self.recurrent}
            out[g]["last"] = torch.zeros(rows, self.spec[g].n, sum(self.spaces[g].sizes), device=device)
        return out

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        actions, after, last = {}, {}, {g: memory[g]["last"] for g in self.groups}
        for g in self.groups:
            view = frame[g]
            pi, state = self._policy(g, frame, last[g], memory[g].get("actor"), None, self._moves(self.remembering(view)))
            floor = self.epsilon if explore and self.learns else torch.zeros_like(self.epsilon)
            actions[g] = pi.mode() if noise is None else self._draw(g, pi, view.legal, noise[g], floor)
            said = values.one_hot(actions[g], self.spaces[g]) * view.active[..., None]
            after[g] = {**memory[g], **({"actor": state} if self.recurrent else {}), "last": said}
        if self.recurrent and explore and self.groups == self.bound:  # whoever learns remembers for its critics too
            played = {g: after[g]["last"] for g in self.groups}
            for g in self.groups:
                seen = self._seen(frame, g, played, last)
                active = self._moves(self.remembering(frame[g]))
                after[g]["critic"] = self.critics[g](seen, memory[g]["critic"], None, active)[1]
        return actions, after, {g: {} for g in self.groups}

    def _policy(
        self, g: str, frame: Frame, last: Tensor, state: Any, start: Tensor | None, active: Tensor | None
    ) -> tuple[Choice, Any]:
        """An actor's distribution, without the floor, and its memory after."""
        actor: Any = self.actors[g]
        obs = self._sight(g).obs(frame, frame[g].active.dim() - 1)
        x = (obs, last) if self.config.last_action else obs
        pi, _, after = actor.unroll(x, frame[g].legal, state, start, active)
        return pi, after

    def _draw(self, g: str, pi: Choice, legal: Tensor | None, noise: Tensor, floor: Tensor) -> Tensor:
        space = self.spaces[g]
        chance = floored(pi.probabilities(), floor, space, legal).clamp(min=TINY).log()
        return Choice(chance, space.sizes, legal, space.shape == ()).sample(noise[..., : chance.shape[-1]])

    def _moves(self, who: Tensor) -> Tensor | None:
        return who if self.recurrent and self.has_inactive else None

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        return steps * rows * sum(self.sizes.values())

    def set_schedules(self, now: Now) -> None:
        c, rate = self.config, self._rate(now)
        self.actor_optimiser.rate.fill_(rate)
        self.critic_optimiser.rate.fill_(rate * (c.lr_critic or c.lr) / c.lr)
        self.entropy_weight.fill_(self._weight(now))
        self.epsilon.fill_(self._epsilon(Now(now.step, c.epsilon_steps, now.updates)))

    def update_statistics(self, batch: Batch) -> None:
        self._weigh(batch)
        for g in self.groups:
            self._sight(g).update(batch.frame)

    def _weigh(self, batch: Batch) -> None:
        """Let the statistics of rewards move."""
        if self.reward_norm is not None:
            for g in self.groups:
                self.reward_norm.update(batch.learner_reward[g], batch.frame[g].alive if self.has_inactive else None)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        played = {g: values.one_hot(batch.actions[g], self.spaces[g]) * batch.frame[g].active[..., None] for g in self.groups}
        last = {g: self._last(batch, g, played[g]) for g in self.groups}
        policies, after = {}, {}
        for g in self.groups:
            policies[g], after[g] = self._policy(g, batch.frame, last[g], *self._moment(batch, g, "actor"))
        if isinstance(self.feed, Rollout):
            self._weigh(batch)  # rewards are new; what was seen stays as it was seen until the update is done
        with torch.no_grad():
            seen = {g: self._seen(batch.frame, g, played, last) for g in self.groups}
            target, valued = self._targets(batch, seen, played, after), self._valued(batch)
            if self.value_norm is not None:
                for x, mask in zip(self.split_groups(target, 2).values(), self.split_groups(valued, 2).values(), strict=True):
                    self.value_norm.update(x, mask)
                target = self.value_norm.normalise(target)
        q, told = self._judge(batch, seen, target, valued)
        told |= self._improve(batch, policies, played, q)
        if isinstance(self.feed, Rollout):
            for g in self.groups:
                self._sight(g).update(batch.frame)
        return {
            **told,
            "epsilon": self.epsilon.clone(),
            "target_lag": self.target.lag(),
            "learning_rate": self.actor_optimiser.rate.clone(),
        }

    def _moment(self, batch: Batch, g: str, whose: str) -> tuple[Any, Tensor | None, Tensor | None]:
        """The memory before a batch's first step, where agents start and whose memory goes on; none where nobody has one."""
        if not self.recurrent:
            return None, None, None
        return batch.memory[g][whose], batch.frame[g].start, self._moves(self.remembering(batch.frame[g]))

    def _last(self, batch: Batch, g: str, played: Tensor) -> Tensor:
        """[T, B, N, A] what agents did the step before; nothing where they start."""
        shifted = torch.cat((batch.memory[g]["last"][None], played[:-1]))
        return shifted.masked_fill(batch.frame[g].start[..., None], 0)

    def _mask(self, batch: Batch, g: str) -> Tensor:
        """[T, B, N] who is in the actors' losses."""
        active = batch.frame[g].active
        return active if batch.filled is None else active & batch.filled[..., None]

    def _valued(self, batch: Batch) -> Tensor:
        """[T, B, N] whose values are learnt, of all groups."""
        valued = self.cat_groups(lambda g: batch.frame[g].active, 2) if (known := self.valued(batch)) is None else known
        return valued if batch.filled is None else valued & batch.filled[..., None]

    def _following(
        self, batch: Batch, frame_tp1: Frame, cut: Tensor, played: dict[str, Tensor], after: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """[T, B, N, A] what was done in the next moments; what would be drawn there, where nothing was done any more. As the
        others see it, and as it is for an agent's own value: one that is cut off alone is gone for the others."""
        assert batch.noise is not None
        noise = batch.noise.split([batch.over.numel() * n for n in self.sizes.values()])
        seen, own = {}, {}
        ends = cut.clone()
        ends[-1] = True
        for (g, hot), end, u in zip(played.items(), self.split_groups(ends, 2).values(), noise, strict=True):
            view = frame_tp1[g]
            state = where_rows(view.start, tree_map(torch.zeros_like, after[g]), tree_map(torch.detach, after[g]))
            pi, _ = self._policy(g, frame_tp1, hot, state, None, self._moves(view.active | ~view.alive))
            sample = values.one_hot(self._draw(g, pi, view.legal, u.reshape(hot.shape), self.epsilon), self.spaces[g])
            nothing = end | ~view.alive
            own[g] = torch.where(nothing[..., None], sample, torch.cat((hot[1:], hot[-1:])))
            seen[g] = own[g] * view.alive[..., None]
        return seen, own

    def _seen(self, frame: Frame, g: str, played: dict[str, Tensor], last: dict[str, Tensor]) -> Tensor:
        """What the critic of a group sees: state and own observation, the others' actions, everybody's last ones."""
        n = self.spec[g].n
        every, before = (torch.cat([x[h].flatten(-2) for h in self.groups], -1)[..., None, :] for x in (played, last))
        others = every * getattr(self, f"others_{g}")
        return torch.cat((self._sight(g).seen(frame), others, before.expand(*before.shape[:-2], n, -1)), -1)

    def _targets(self, batch: Batch, seen: dict[str, Tensor], played: dict[str, Tensor], after: dict[str, Any]) -> Tensor:
        """[T, B, N] TD(lambda) returns of the target critics, of all groups."""
        frame_tp1, (terminated, cut) = self.next_frame(batch), self.ends(batch)
        following, own = self._following(batch, frame_tp1, cut, played, after)

        def next_value(g: str) -> Tensor:
            view, targets, state = frame_tp1[g], cast(nn.ModuleDict, self.target.module), {}
            if self.recurrent:
                _, state = targets[g](seen[g], *self._moment(batch, g, "critic"))
                state = where_rows(view.start, tree_map(torch.zeros_like, state), state)
            q, _ = targets[g](self._seen(frame_tp1, g, following, played), state, None, self._moves(view.active | ~view.alive))
            return self._in_rewards(values.expected(q, own[g], self.spaces[g]))

        value_tp1 = self.cat_groups(next_value, 2)
        return td_lambda(self._reward(batch), value_tp1, terminated, cut, self.config.gamma, self.config.lam)

    def _in_rewards(self, value: Tensor) -> Tensor:
        """Values in the units of the rewards that are learnt from."""
        return value if self.value_norm is None else self.value_norm.denormalise(value)

    def _reward(self, batch: Batch) -> Tensor:
        reward = self.earned(batch) * self.config.reward_scale
        return reward if self.reward_norm is None else self.reward_norm.divide(reward)

    def _judge(
        self, batch: Batch, seen: dict[str, Tensor], target: Tensor, valued: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The critics' steps. Returns what they said before each of them, [T, B, N, A], and means over all samples."""
        c, steps = self.config, len(batch.over)
        pieces = spans(steps, max(c.critic_slices, 1))
        states = {g: self._states(batch, g, seen[g], [a for a, _ in pieces]) for g in self.groups}
        own = {g: values.one_hot(self.taken(batch, g), self.spaces[g]) for g in self.groups}
        said: dict[str, list[Tensor]] = {g: [] for g in self.groups}
        told: list[dict[str, Tensor]] = []
        counts: list[Tensor] = []
        for k, (a, b) in reversed(list(enumerate(pieces))):
            taken = []
            for g in self.groups:
                moment = tree_map(lambda x: x[a:b], self._moment(batch, g, "critic")[1:])  # noqa: B023
                q, _ = self.critics[g](seen[g][a:b], states[g][k], *moment)
                said[g].append(q.detach())
                taken.append(values.expected(q, own[g][a:b], self.spaces[g]))
            value, goal, there = torch.cat(taken, 2), target[a:b], valued[a:b]
            error, count = losses.value_error(value, goal, c.huber), there.sum()
            norm = self.critic_optimiser.descend(losses.masked_sum(error, there), count, count > 0)
            self.target.follow(count > 0)
            value = value.detach()
            each = {"critic_loss": error.detach(), "td_error": (goal - value).abs(), "q": self._in_rewards(value)}
            told.append({**{k: losses.masked_mean(x, there) for k, x in each.items()}, "grad_norm_critic": norm})
            counts.append(count)
        return {g: self._in_rewards(torch.cat(xs[::-1])) for g, xs in said.items()}, losses.weighted_means(told, counts)

    @torch.no_grad()
    def _states(self, batch: Batch, g: str, seen: Tensor, begins: list[int]) -> list[Any]:
        """The critic's memory before each of these steps."""
        first, *moment = self._moment(batch, g, "critic")
        if begins == [0] or not self.recurrent:
            return [first] * len(begins)
        _, after = self.critics[g](seen, first, *moment)
        return [first if a == 0 else tree_map(lambda x, a=a: x[a - 1], after) for a in begins]

    def _improve(
        self,
        batch: Batch,
        policies: dict[str, Choice],
        played: dict[str, Tensor],
        q: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The actors' step."""
        total, size, told = [], [], []
        for g in self.groups:
            space, mask = self.spaces[g], self._mask(batch, g)
            pi = floored(policies[g].probabilities(), self.epsilon, space, batch.frame[g].legal)
            log = pi.clamp(min=TINY).log()
            advantage = values.counterfactual(q[g], pi.detach(), played[g], space)
            scope = self.config.advantage_scope
            if scope != "none":
                advantage = losses.normalise(advantage, mask, (0, 1) if scope == "agent" else None)
            loss, entropy = -advantage * (log * played[g]).sum(-1), -(pi * log).sum(-1)
            total.append(losses.masked_sum(loss - self.entropy_weight * entropy, mask))
            size.append(mask.sum())
            each = {"policy_loss": loss, "entropy": entropy, "advantage": advantage.abs()}
            told.append({k: losses.masked_mean(x.detach(), mask) for k, x in each.items()})
        count = torch.stack(size).sum()
        norm = self.actor_optimiser.descend(torch.stack(total).sum(), count, count > 0)
        return {**{k: torch.stack([t[k] for t in told]).mean() for k in told[0]}, "grad_norm_actor": norm}

    def values(self, frame: Frame) -> Tensor:
        """What a batch's moments are worth, [T, B, N], to nets without memory, beside what the others would do; what was done
        before is taken to be the same."""
        last, chance, chosen, parts = {}, {}, {}, []
        for g, space in self.spaces.items():
            none = torch.zeros(*frame[g].active.shape, sum(space.sizes), device=frame[g].active.device)
            pi, _ = self._policy(g, frame, none, None, None, None)
            chance[g] = floored(pi.probabilities(), self.epsilon, space, frame[g].legal)
            chosen[g] = values.one_hot(pi.mode(), space)
            last[g] = chosen[g].masked_fill(frame[g].start[..., None], 0)
        for g, space in self.spaces.items():
            q, _ = self.critics[g](self._seen(frame, g, chosen, last))
            parts.append(self._in_rewards(values.expected(q, chance[g], space)))
        return torch.cat(parts, 2)
