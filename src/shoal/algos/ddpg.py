"""DDPG and MADDPG (Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971; Lowe et al., 2017, https://arxiv.org/abs/1706.02275).

A deterministic actor climbs what a critic says of its actions, and the critic learns from a replay of the past:

    L_critic = (y - Q(x, a))^2,    y = r + gamma (1 - terminated) Q'(x', mu'(o'))
    L_actor  = -Q(x, (mu_i(o_i), a_-i))

where Q' and mu' are copies that follow slowly. `ddpg` (`iddpg` of teams): x and a are an agent's own. `maddpg` (`--algo.critic
world`): x is the state or all observations, a the actions of all agents of all groups, whoever plays them and whatever kind
they are; at the next moment those of their target policies.

One implementation for all kinds of actions. Continuous ones are tanh of the actor's output, with noise while exploring. Of
discrete and multi-discrete ones the actor puts out logits: it acts by a Gumbel sample (Jang et al., 2017) and, beyond that,
at random now and then; its loss goes through a straight-through Gumbel-softmax; the target takes the arg-max, one-hot; it is
evaluated by the arg-max. Illegal choices are out in all of them.

Knobs, and what they do

  Exploration. `noise` is the standard deviation of what is added to continuous actions, in units of half their range, and the
  share of discrete actions that are random, from `noise` to `noise_last` over `noise_steps`. `noise_keep` 0.85 makes it an
  Ornstein-Uhlenbeck process: of the same size, but alike from step to step. The first `random_steps` are uniformly random.

  Critics. `critic` own, team or world; `critic_input` as in `algos/ppo.py`. With a critic of the team or the world, agents that
  are paid alike (`--reward team-mean`) have one; where pay differs each has its own, whatever `--net.share` says.
  `others` says whose actions stand beside an agent's own in its loss: those in the buffer, as published, or what the others'
  policies would do now (Gumbel samples of its own group, the arg-max of others that are DDPG).

  Targets. `target_tau` 0.01 and `target_every` 1 follow smoothly; 1 and 200 copy. `n_step`, `time_limit`, `after_death`,
  `prioritised` and `huber` as in `algos/ddqn.py`; the dead do nothing, zeros. One critic for agents that are paid alike goes on
  with their team; with `after_death` own each has its own value, which ends with it.

  The actor. `gumbel` is the temperature of the relaxation; `regularise` a weight on the squares of the actor's outputs, before
  tanh or softmax, without which they run to where gradients vanish.

  Memory (`--net.memory gru`). Actor and critics have one each, of what they see; sequences as in `algos/ddqn.py`.

  The step. `lr`, `lr_critic`, each with its schedule, and all else as in `algos/ddqn.py`.

Metrics, for each group

    loss_actor           the actor's loss above
    loss_critic          the critics' loss above
    predictQ             mean value of the actions that were taken: far above any return is overestimation
    td_error             mean |y - Q|
    learning_rate_actor  as it is now
    learning_rate_critic as it is now
    noise                exploration as it is now
    target_lag           how far the critics' copy is behind: norm of the difference over that of the weights
    grad_norm_actor      before clipping
    grad_norm_critic     before clipping

Departures from the papers: rows step together, and the ratio of updates counts environment steps; AdamW with an epsilon of
1e-5; observations are normalised; outputs are regularised for continuous actions too. Scores and their commands:
`benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.actorcritic import ActorCritic, Metrics, QValue
from shoal.algos.base import Seat
from shoal.algos.checks import bounded
from shoal.algos.samples import Samples
from shoal.algos.target import Target
from shoal.nets.heads import Net
from shoal.ops.distributions import make
from shoal.ops.explore import epsilon_greedy, perturbed
from shoal.ops.schedules import Now
from shoal.ops.values import one_hot
from shoal.spec import Box


class DDPG(ActorCritic):
    names = {"iddpg": {}, "maddpg": {"critic": "world"}}
    critics_climbed = 1

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        rules: ClassVar[defaults.Rules] = {**ActorCritic.Config.rules, "noise_steps": defaults.half}

        noise: float = 0.2  # exploration at first: deviation of what is added to continuous actions; share of random choices
        noise_last: float = 0.05  # and at last
        noise_steps: int | None = None  # environment steps until then; flat from there on; none: half of the run
        noise_schedule: str = "linear"  # constant, linear, cosine, exponential, or module:Class
        gumbel: float = 1.0  # temperature of the relaxation that gradients of discrete actions go through
        regularise: float = 1e-3  # weight of the squares of the actor's outputs, before tanh or softmax

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, dict.fromkeys(("noise", "noise_last", "regularise"), (0, 1e30)), ("noise_steps", "gumbel"))

    epsilon: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c = self.config
        self.noise = self.width if isinstance(self.space, Box) else 2 * self.width + 1
        self._epsilon = self.schedule("noise", last=c.noise_last)
        self.register_buffer("epsilon", torch.tensor(c.noise, device=seat.device))  # how much is explored now
        self.target_actor = Target(self.actor, self.actor_optimiser, c.target_every * c.delay, c.target_tau)

    @property
    def nets(self) -> dict[str, nn.Module]:
        return {**super().nets, "target_actor": self.target_actor.module}

    @property
    def next_actor(self) -> Net:
        return self.target_actor.module  # type: ignore[return-value]

    def sample_action(self, params: Tensor, legal: Tensor | None, noise: Tensor | None, explore: bool) -> Tensor:
        u = noise if explore else None
        if isinstance(self.space, Box):
            return params.tanh() if u is None else perturbed(params.tanh(), u, self.epsilon)
        pi = make(self.space, params, legal)
        if u is None:
            return pi.mode()
        sample = pi.sample(u[..., : self.width])
        return epsilon_greedy(sample, u[..., self.width :], self.epsilon, self.space, legal)

    def next_action(self, params: Tensor, legal: Tensor | None, noise: Tensor) -> tuple[Tensor, Any]:
        if isinstance(self.space, Box):
            return params.tanh(), None
        return one_hot(make(self.space, params, legal).mode(), self.space), None

    def next_value(self, q: Tensor, policy: Any, active: Tensor | None) -> Tensor:
        return q

    def actor_loss(
        self, params: Tensor, legal: Tensor | None, noise: Tensor, q_value: QValue
    ) -> tuple[Tensor, Tensor, Metrics]:
        continuous = isinstance(self.space, Box)
        action = params.tanh() if continuous else make(self.space, params, legal).relaxed(noise, self.config.gumbel)
        return self.config.regularise * params.square().mean(-1), q_value(action)[0], {}

    def set_schedules(self, now: Now) -> None:
        super().set_schedules(now)
        self.epsilon.fill_(self._epsilon(Now(now.step, self.config.noise_steps, now.updates)))

    def update(self, samples: Samples) -> Metrics:
        metrics = super().update(samples)
        self.target_actor.follow()
        return {**metrics, "noise": self.epsilon.clone()}
