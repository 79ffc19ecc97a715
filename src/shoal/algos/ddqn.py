"""DDQN and DQN (van Hasselt et al., 2016; Mnih et al., 2015): values of choices, learnt from a replay of the past.

For one agent or for many, each of which learns its own values as if the others were a part of the world. A batch of what
happened is drawn from the replay, and

    L = huber(y - Q(o, a)),    y = r + gamma (1 - terminated) Q'(o', argmax_a Q(o', a)),

where Q' is a copy that follows Q slowly. `dqn` (`--algo.double false`) takes the maximum of Q' itself, which overestimates.
`iql`, `vdn` and `qmix` are short files over this one; `joint` is the hook that they override.

Knobs, and what they do

  Experience. Every row is played for `rollout` steps, and for every `every` environment steps, all rows counted, one update is
  made on a `batch` drawn from the last `capacity`. Smaller `every` learns more from each step and takes longer. Nothing is
  learnt before `learning_starts`. `prioritised` draws what was predicted badly more often, in proportion to error **
  `priority`, with importance weights whose exponent goes from `priority_weight` to 1 over the run. What does not fit into
  memory is refused before anything starts.

  Exploration. With probability epsilon any legal action, tossed for each row and agent: from `epsilon` to `epsilon_last` over
  the first `epsilon_steps` environment steps, then flat, by `epsilon_schedule`. `epsilon_keep` 0.9 lets a random action go on,
  ten steps on average: where single random steps lead nowhere (MountainCar) it is what finds the goal. `noisy` puts noise
  whose size is learnt into the output layer, for each row and agent its own: give it `--algo.epsilon 0`. Who does not learn
  any more plays greedily, whoever asks for samples.

  Targets. `n_step` rewards before the values take over, fewer where an episode ends; what was cut off is bootstrapped from its
  true last observation (`time_limit`). `after_death` as in `algos/ppo.py`: where pay is common a return goes on with the team
  after an agent's death; the dead see zeros and have one choice, the first, whose value is learnt. `target_every` 200 and
  `target_tau` 1 copy the weights every 200 updates; 1 and 0.01 let the copy follow smoothly. `dueling` splits values from
  advantages.

  Memory (`--net.memory gru`). Sequences of `chunk` steps are drawn with the memory that was held before them, after `burn_in`
  steps that only bring it up to date; the target is unrolled over the same steps.

  The step. `lr` with schedules, `huber` or squared errors, `weight_decay`, `grad_clip`, normalisers, `reward_scale`, a `shaper`
  of one's own: as in `algos/ppo.py`. Rewards are stored as they were paid at the time.

Metrics, for each group

    td_loss        what is descended;       td_error  mean |y - Q|
    q              mean value of the actions that were taken: a value far above any return is overestimation
    epsilon        now;                     learning_rate
    target_lag     how far the copy is behind: norm of the difference over that of the weights
    grad_norm      before clipping

Departures from the papers: rows step together, and the ratio of updates counts environment steps; actions of several
dimensions are worth the mean of their choices' values, and are learnt by one error; dueling streams share the hidden layers;
noise is in the output layer alone; priorities of sequences and of several agents are 0.9 of the largest error over time
(mean over agents) and 0.1 of the mean; Adam's epsilon is 1e-5. Scores and their commands: `benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algos import recall
from shoal.algos.base import Algorithm, Optimiser, Target, bounded
from shoal.algos.observations import Observations
from shoal.algos.recall import ReplayConfig
from shoal.nets.heads import QNetwork
from shoal.nets.layers import NetConfig
from shoal.nets.norm import Running, normaliser
from shoal.ops import losses, schedules, values
from shoal.ops.distributions import noise_of
from shoal.ops.explore import epsilon_greedy, epsilon_keeping
from shoal.ops.schedules import Now
from shoal.spec import Batch, EnvSpec, Frame, UserError, tree_map, where_rows


class DDQN(Algorithm):
    names = {"dqn": {"double": False}}
    takes = ("discrete", "multi-discrete")

    @dataclass(frozen=True)
    class Config(ReplayConfig):
        double: bool = True  # the net chooses the next action, the target scores it; false: the target's maximum
        dueling: bool = False  # value and advantages apart
        noisy: bool = False  # learnt noise in the output's weights; give it --algo.epsilon 0
        epsilon: float = 1.0  # probability of any action, at first
        epsilon_last: float = 0.05  # and at last
        epsilon_steps: int = 100_000  # environment steps until then; flat from there on
        epsilon_schedule: str = "linear"  # constant, linear, cosine, exponential, or module:Class
        epsilon_keep: float = 0.0  # chance that a random action goes on for another step; as many steps stay random

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"epsilon": (0, 1), "epsilon_last": (0, 1), "epsilon_keep": (0, 0.999)}, ("epsilon_steps",))

    epsilon: Tensor

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
            raise UserError(f"--net.trunk shared is for actors beside critics: {type(self).__name__} has neither.")
        self.as_one = self.unit == "team"
        if self.as_one and c.after_death == "own":
            raise UserError(f"{type(self).__name__} has one value for a team, which ends with it: leave --algo.after-death.")
        self.recurrent = net.memory != "none"
        self.chunk, self.burn_in = recall.lengths(self)
        self.feed = recall.feed(c, self.chunk, self.burn_in)
        self.spaces: dict[str, Any] = {g: spec[g].action for g in groups}
        make = normaliser(c.normaliser)
        see = partial(Observations, self, "own", "state", net, c.normalise_obs, make, blank=self.values_dead)
        self.observations = nn.ModuleDict({g: see((g,)) for g in groups})
        self.online = nn.ModuleDict({g: self._values(g, generator) for g in groups})
        self.mixer = self.make_mixer(generator)
        self.reward_norm = Running() if c.normalise_reward else None
        self.noisy_draws = {g: self._net(g).noise for g in groups}
        self.tosses = 2 if c.epsilon_keep else 1  # uniform numbers beside those that choose
        self.noise = max(self.tosses + noise_of(self.spaces[g]) + self.noisy_draws[g] for g in groups)
        self._rate = schedules.make(c.lr_schedule, c.lr, c.lr * c.lr_last, "--algo.lr-schedule")
        self._epsilon = schedules.make(c.epsilon_schedule, c.epsilon, c.epsilon_last, "--algo.epsilon-schedule")
        self.register_buffer("epsilon", torch.tensor(c.epsilon))
        self.to(device)
        learnt = nn.ModuleDict({"agents": self.online, **({} if self.mixer is None else {"mixer": self.mixer})})
        self.optimiser = Optimiser([learnt], c.lr, c.weight_decay, c.grad_clip)
        self.target = Target(learnt, self.optimiser, c.target_every, c.target_tau)

    def _values(self, group: str, generator: torch.Generator) -> QNetwork:
        c, observations = self.config, self._sight(group)
        return QNetwork(
            observations.encoder(generator), self.spaces[group], observations.agents, self.net, generator, c.dueling, c.noisy
        )

    def _sight(self, group: str) -> Observations:
        return self.observations[group]  # type: ignore[return-value]

    def _net(self, group: str, target: bool = False) -> QNetwork:
        copied: Any = self.target.module if target else {"agents": self.online}
        return copied["agents"][group]

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {"values": self.online, "target": self.target.module, **({} if self.mixer is None else {"mixer": self.mixer})}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for g in self.groups:
            remembers, wide = self._net(g).net.memory, 1 + len(self.spaces[g].sizes)
            out[g] = {} if remembers is None else dict(remembers.zero(rows, device))
            if self.config.epsilon_keep:
                out[g]["random"] = torch.zeros(rows, self.spec[g].n, wide, dtype=torch.long, device=device)
        return out

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        actions, after = {}, {}
        for g in self.groups:
            view, space = frame[g], self.spaces[g]
            u = noise[g] if noise is not None and explore and self.learns else None
            weights = None if u is None or not self.noisy_draws[g] else u[..., -self.noisy_draws[g] :]
            obs = self._sight(g).obs(frame, view.active.dim() - 1)
            q, state = self._net(g)(obs, memory[g], None, self._moves(self.remembering(view)), weights)
            actions[g], after[g] = values.best(q, space, view.legal), {**memory[g], **state}
            if u is None:
                continue
            u, keep = u[..., : self.tosses + noise_of(space)], self.config.epsilon_keep
            if keep:
                before = memory[g]["random"]
                actions[g], now = epsilon_keeping(actions[g], u, self.epsilon, keep, before, space, view.legal)
                after[g]["random"] = now.where(view.active[..., None], before)  # whoever waits for its turn goes on later
            else:
                actions[g] = epsilon_greedy(actions[g], u, self.epsilon, space, view.legal)
        return actions, after, {g: {} for g in self.groups}

    def _moves(self, who: Tensor) -> Tensor | None:
        return who if self.recurrent and self.has_inactive else None

    # --- learning ---

    def joint(self, q: Tensor, there: Tensor | None, frame: Frame, target: bool) -> Tensor:
        """The values that learn, of all agents' [T, B, N]: here each agent's own; of mixers their team's, [T, B, 1]. `there`:
        who counts; none: all."""
        return q

    def make_mixer(self, generator: torch.Generator) -> nn.Module | None:
        """What a mixer learns beside its agents' values."""
        return None

    def draws(self, steps: int, rows: int) -> int:
        return 3 * sum(self.noisy_draws.values())

    def set_schedules(self, now: Now) -> None:
        self.optimiser.rate.fill_(self._rate(now))
        self.epsilon.fill_(self._epsilon(Now(now.step, self.config.epsilon_steps, now.updates)))

    def update_statistics(self, batch: Batch) -> None:
        for g in self.groups:
            self._sight(g).update(batch.frame)
        recall.weigh(self, batch)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        c, weight = self.config, batch.weight
        later = recall.later(batch, self.burn_in)
        looks = [self._look(batch, later, g, noise) for g, noise in self._noise(batch).items()]
        q_t, q_tp1 = (torch.cat([variant[k] for variant in looks], 2) for k in (0, 1))
        value_t = torch.cat([variant[2] for variant in looks], 2) if self.spec.turns else None
        active = self.mask(later)
        goes_on = recall.goes_on(self, later) if self.has_inactive else None
        q_t = self.joint(q_t, active, later.frame, target=False)
        with torch.no_grad():
            q_tp1 = self.joint(q_tp1, goes_on, later.next, target=True)
            target, mask = recall.targets(self, later, recall.reward(self, later), q_tp1, value_t)
        q_t, target = q_t[: self.chunk], target[: self.chunk]  # what follows was there for its rewards
        mask = None if mask is None else mask[: self.chunk]
        loss = losses.value_error(q_t, target, c.huber)
        loss = loss if weight is None else loss * weight[:, None]
        count = q_t.numel() if mask is None else mask.sum()
        norm = self.optimiser.descend(losses.masked_sum(loss, mask), count, None if mask is None else mask.any())
        self.target.follow()
        error = (target - q_t).detach()
        return {
            "td_loss": losses.masked_mean(loss.detach(), mask),
            "td_error": losses.masked_mean(error.abs(), mask),
            "q": losses.masked_mean(q_t.detach(), mask),
            "epsilon": self.epsilon.clone(),
            "learning_rate": self.optimiser.rate.clone(),
            "target_lag": self.target.lag(),
            "grad_norm": norm,
            **({"priority": values.td_priority(error, mask)} if c.prioritised else {}),
        }

    def _noise(self, batch: Batch) -> dict[str, tuple[Tensor | None, ...]]:
        """For each group what the weights of net, net at the next moments, and target take."""
        out: dict[str, tuple[Tensor | None, ...]] = {}
        at = 0
        for g, width in self.noisy_draws.items():
            out[g] = batch.noise[at : at + 3 * width].unflatten(0, (3, width)).unbind() if width else (None,) * 3  # type: ignore[index]
            at += 3 * width
        return out

    def _look(self, batch: Batch, later: Batch, g: str, noise: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """[T, B, N] of what is `later` than the burn-in: what the actions taken are worth, and what the next moments are; and
        the present ones, where agents wait for turns."""
        space, net, target = self.spaces[g], self._net(g), self._net(g, target=True)
        q_t, after = self._unroll(net, batch, g, noise[0])
        with torch.no_grad():
            following, value_t = self.next_frame(later), None
            view = following[g]
            after_target: Any = {}
            if self.recurrent or self.spec.turns:
                present, after_target = self._unroll(target, batch, g, noise[2])
            if self.spec.turns:
                value_t = values.double_q(q_t if self.config.double else present, present, space, later.frame[g].legal)
            if self.recurrent:
                states = tree_map(torch.detach, (after, after_target))
                after, after_target = where_rows(view.start, tree_map(torch.zeros_like, states), states)
            obs, active = self._sight(g).obs(following, 2), self._moves(view.active | ~view.alive)
            scorer, _ = target(obs, after_target, None, active, noise[2])
            chooser = net(obs, after, None, active, noise[1])[0] if self.config.double else scorer
            q_tp1 = values.double_q(chooser, scorer, space, view.legal)
        return values.taken(q_t, self.taken(later, g), space), q_tp1, value_t

    def _unroll(self, net: QNetwork, batch: Batch, g: str, noise: Tensor | None) -> tuple[Tensor, Any]:
        """Values after the burn-in, and the memory after each step."""
        obs, view = self._sight(g).obs(batch.frame, 2), batch.frame[g]
        if not self.recurrent:
            return net(obs, noise=noise)
        variant = partial(net, noise=noise)
        return recall.unrolled(variant, self.burn_in, obs, batch.memory[g], view.start, self._moves(self.remembering(view)))

    def values(self, frame: Frame) -> Tensor:
        """What a batch's moments are worth, [T, B, N], to nets without memory."""
        parts = [
            values.double_q(q, q, self.spaces[g], frame[g].legal)
            for g in self.groups
            for q, _ in (self._net(g)(self._sight(g).obs(frame, 2)),)
        ]
        return self.joint(torch.cat(parts, 2), None, frame, False).expand(-1, -1, self.n)
