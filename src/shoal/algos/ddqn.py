"""DDQN and DQN (van Hasselt et al., 2016; Mnih et al., 2015): values of choices, learnt from a replay of the past.

For one agent or for many, each of which learns its own values as if the others were a part of the world. A batch of what
happened is drawn from the replay, and

    L = huber(y - Q(o, a)),    y = r + gamma (1 - terminated) Q'(o', argmax_a Q(o', a)),

where Q' is a copy that follows Q slowly. `dqn` (`--algo.double false`) takes the maximum of Q' itself, which overestimates.
`iql`, `vdn` and `qmix` are short files over this one: `joint` is the hook that they override; `td_loss` is another, for
losses of your own.

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

  Errors. Where a mistake costs all that was to come, as in CartPole, errors are rare and large: a hundred where the pole falls,
  a fraction elsewhere. A Huber loss of 1, or a gradient clipped to a norm of 10, counts such an error no more than a hundredth
  of what it is. The fall is then believed too late, and what stood at 500 fell back to 95, for values crept up by about one
  with each copy of the target (last of 300k steps, with both: 89, 240, 486; clipped alone and the loss squared: 500 with falls
  on the way; neither: 500 from a third of the run on). Squared errors had LunarLander hover instead of landing (-11 to 28);
  `huber` 10, no clipping, is the loss that did well on both (500 and 247).

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

    td_loss              the loss above
    td_error             mean |y - Q|
    q                    mean value of the actions that were taken: a value far above any return is overestimation
    epsilon              probability of a random action now
    learning_rate        as it is now
    target_lag           how far the copy is behind: norm of the difference over that of the weights
    grad_norm            before clipping

Departures from the papers: rows step together, and the ratio of updates counts environment steps; actions of several
dimensions are worth the mean of their choices' values, and are learnt by one error; dueling streams share the hidden layers;
noise is in the output layer alone; priorities of sequences and of several agents are 0.9 of the largest error over time
(mean over agents) and 0.1 of the mean; Adam's epsilon is 1e-5. Scores and their commands: `benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.base import Acted, Seat
from shoal.algos.checks import bounded
from shoal.algos.observations import Observations
from shoal.algos.offpolicy import OffPolicy, ReplayConfig
from shoal.algos.samples import Samples
from shoal.algos.target import Target
from shoal.nets.qnets import QNetwork
from shoal.ops import losses, values
from shoal.ops.distributions import params_of
from shoal.ops.explore import epsilon_greedy, epsilon_keeping
from shoal.ops.schedules import Now
from shoal.spec import Batch, Frame, UserError, View


class DDQN(OffPolicy):
    names = {"dqn": {"double": False}}
    takes = ("discrete", "multi-discrete")
    value_metric = "q"

    @dataclass(frozen=True)
    class Config(ReplayConfig):
        rules: ClassVar[defaults.Rules] = {
            **ReplayConfig.rules,
            "epsilon_steps": defaults.tenth,
            "epsilon_keep": defaults.epsilon_keep,
            "n_step": defaults.n_step,
        }

        n_step: int | None = None  # rewards before values take over; none: 1 where episodes last at most 50 steps, else 3
        huber: float | None = 10.0  # errors beyond this count linearly; none: squared errors
        double: bool = True  # the net chooses the next action, the target scores it; false: the target's maximum
        dueling: bool = False  # value and advantages apart
        noisy: bool = False  # learnt noise in the output's weights; give it --algo.epsilon 0
        epsilon: float = 1.0  # probability of any action, at first
        epsilon_last: float = 0.05  # and at last
        epsilon_steps: int | None = None  # environment steps until then; flat from there on; none: a tenth of the run
        epsilon_schedule: str = "linear"  # constant, linear, cosine, exponential, or module:Class
        epsilon_keep: float | None = None  # chance that a random action goes on for another step; none: by the horizon

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"epsilon": (0, 1), "epsilon_last": (0, 1), "epsilon_keep": (0, 0.999)}, ("epsilon_steps",))

    epsilon: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c, spec, groups, generator = self.config, self.spec, self.groups, seat.generator
        if self.net.trunk == "shared":
            raise UserError(f"--net.trunk shared is for actors beside critics: {type(self).__name__} has neither.")
        self.as_one = self.unit == "team"
        if self.as_one and c.after_death == "own":
            raise UserError(f"{type(self).__name__} has one value for a team, which ends with it: leave --algo.after-death.")
        self.spaces: dict[str, Any] = {g: spec[g].action for g in groups}
        self.observations: Any = nn.ModuleDict({g: Observations(self, groups=(g,), zero_dead=self.values_dead) for g in groups})
        self.online = nn.ModuleDict({g: self._q_network(g, generator) for g in groups})
        self.mixer = self.make_mixer(generator)
        self.set_feed()
        self.noisy_draws = {g: self._q_net(g).noise for g in groups}
        tosses = 2 if c.epsilon_keep else 1  # uniform numbers beside those that choose
        self.choices = {g: params_of(self.spaces[g]) for g in groups}
        self.noise = max(tosses + self.choices[g] + self.noisy_draws[g] for g in groups)
        self._rate, self._epsilon = self.schedule("lr"), self.schedule("epsilon", last=c.epsilon_last)
        self.register_buffer("epsilon", torch.tensor(c.epsilon))
        self.place(seat.device)
        learnt = nn.ModuleDict({"agents": self.online, **({} if self.mixer is None else {"mixer": self.mixer})})
        self.optimiser = self.make_optimiser([learnt], c.lr)
        self.target = Target(learnt, self.optimiser, c.target_every, c.target_tau)

    def _q_network(self, group: str, generator: torch.Generator) -> QNetwork:
        c, seen = self.config, self.observations[group]
        return QNetwork(seen.encoder(generator), self.spaces[group], seen.agents, self.net, generator, c.dueling, c.noisy)

    def _q_net(self, group: str, target: bool = False) -> QNetwork:
        nets: Any = self.target.module["agents"] if target else self.online  # type: ignore[index]
        return nets[group]

    @property
    def nets(self) -> dict[str, nn.Module]:
        target: Any = self.target.module
        mixers = {} if self.mixer is None else {"mixer": self.mixer, "target_mixer": target["mixer"]}
        return {"values": self.online, "target_values": target["agents"], **mixers}

    # --- acting ---

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for g in self.groups:
            out[g] = self._q_net(g).net.zero_memory(rows, device)
            if self.config.epsilon_keep:
                wide = 1 + len(self.spaces[g].sizes)
                out[g]["random"] = torch.zeros(rows, self.spec[g].n, wide, dtype=torch.long, device=device)
        return out

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        actions, after = {}, {}
        for g in self.groups:
            view, space = frame[g], self.spaces[g]
            u = noise[g] if noise is not None and explore and self.learns else None
            weights = None if u is None or not self.noisy_draws[g] else u[..., -self.noisy_draws[g] :]
            active = self.remembers(view) if self.recurrent and self.has_inactive else None
            q, state = self._q_net(g)(self.observations[g].actor_input(frame), memory[g], None, active, noise=weights)
            actions[g], after[g] = values.best(q, space, view.legal), {**memory[g], **state}
            if u is not None and self.config.epsilon_keep:
                actions[g], after[g]["random"] = self._explore_on(actions[g], u, memory[g]["random"], view, space)
            elif u is not None:
                actions[g] = epsilon_greedy(actions[g], u[..., : 1 + self.choices[g]], self.epsilon, space, view.legal)
        return Acted(actions, after, {g: {} for g in self.groups})

    def _explore_on(self, greedy: Tensor, u: Tensor, before: Tensor, view: View, space: Any) -> tuple[Tensor, Tensor]:
        """Exploration that may go on from the step before, and which random action that is."""
        u, keep = u[..., : 2 + params_of(space)], self.config.epsilon_keep
        action, now = epsilon_keeping(greedy, u, self.epsilon, keep, before, space, view.legal)
        return action, now.where(view.active[..., None], before)  # whoever waits for its turn goes on later

    # --- learning ---

    def joint(self, q: Tensor, active: Tensor | None, frame: Frame, target: bool) -> Tensor:
        """The values that learn, of all agents' [T, B, N]: here each agent's own; of mixers their team's, [T, B, 1]. `active`:
        who counts; none: all."""
        return q

    def make_mixer(self, generator: torch.Generator) -> nn.Module | None:
        """What a mixer learns beside its agents' values."""
        return None

    def td_loss(self, q: Tensor, target: Tensor) -> Tensor:
        """The loss of each value, of its own shape."""
        return losses.value_error(q, target, self.config.huber)

    def draws(self, steps: int, rows: int) -> int:
        return 3 * sum(self.noisy_draws.values())

    def set_schedules(self, now: Now) -> None:
        self.optimiser.rate.fill_(self._rate(now))
        self.epsilon.fill_(self._epsilon(Now(now.step, self.config.epsilon_steps, now.updates)))

    def update_statistics(self, batch: Batch) -> None:
        for g in self.groups:
            self.observations[g].update(batch.frame)
        if self.reward_norm is not None:
            self.update_reward_norm(batch)

    def update(self, samples: Samples) -> dict[str, Tensor]:
        noise = self._noise(samples) if self.config.noisy else {}
        parts = [self._q_values(samples[g], g, *noise.get(g, ())) for g in self.groups]
        q_t, q_tp1 = torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2)
        value_t = torch.cat([p[2] for p in parts if p[2] is not None], 2) if self.spec.turns else None
        q_t = self.learnt(self.joint(q_t, samples.active, samples.frame, target=False))
        with torch.no_grad():
            q_tp1 = self.joint(q_tp1, samples.goes_on, samples.later.next, target=True)
            target, mask = self.td_target(samples, q_tp1, value_t)
        loss = self.td_loss(q_t, target)
        loss = loss if samples.weight is None else loss * samples.weight[:, None]
        norm = self.optimiser.descend(losses.masked_sum(loss, mask), losses.active_count(loss, mask))
        self.target.follow()
        error = (target - q_t).detach()
        return {
            **self.metric_means({"td_loss": loss, "td_error": error.abs(), "q": q_t}, mask),
            "epsilon": self.epsilon.clone(),
            "learning_rate": self.optimiser.rate.clone(),
            "target_lag": self.target.lag(),
            "grad_norm": norm,
            **({"priority": values.td_priority(error, mask)} if self.config.prioritised else {}),
        }

    def _q_values(self, samples: Samples, g: str, *noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T, B, N] of one group: Q of the actions taken, Q' of the next frames, and of these where agents wait for turns."""
        space, online, target = self.spaces[g], self._q_net(g), self._q_net(g, target=True)
        nets = zip((online, online, target), noise or (None,) * 3, strict=True)
        online_t, online_tp1, target_t = (partial(net, noise=u) for net, u in nets)
        memory, value_t, after_target = samples.memory if self.recurrent else None, None, None
        q_t, after = samples.unroll(online_t, samples.actor_input, memory)
        with torch.no_grad():
            if self.recurrent or self.spec.turns:
                present, after_target = samples.unroll(target_t, samples.actor_input, memory)
            if self.spec.turns:
                value_t = values.double_q(q_t if self.config.double else present, present, space, samples.legal)
            scores, _ = samples.after(target_t, samples.next_actor_input, after_target)
            chosen = samples.after(online_tp1, samples.next_actor_input, after)[0] if self.config.double else scores
            q_tp1 = values.double_q(chosen, scores, space, samples.next_legal)
        return values.taken(q_t, samples.action, space), q_tp1, value_t

    def _noise(self, samples: Samples) -> dict[str, tuple[Tensor, ...]]:
        """For each group what the weights of the net, of the net in the next frames, and of the target take."""
        widths = [3 * width for width in self.noisy_draws.values()]
        parts = samples.noise[: sum(widths)].split(widths)  # type: ignore[index]
        return {g: x.unflatten(0, (3, -1)).unbind() for g, x in zip(self.groups, parts, strict=True)}

    def values(self, frame: Frame) -> Tensor:
        parts = [
            values.double_q(q, q, self.spaces[g], frame[g].legal)
            for g in self.groups
            for q, _ in (self._q_net(g)(self.observations[g].actor_input(frame)),)
        ]
        return self.joint(torch.cat(parts, 2), None, frame, False).expand(-1, -1, self.n)
