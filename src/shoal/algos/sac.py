"""SAC and MASAC (Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905; for choices Christodoulou, 2019): reward and entropy.

    y = r + gamma (1 - terminated) (min_k Q'_k(x', a') - alpha log pi(a' | o')),    a' ~ pi
    L_actor = alpha log pi(a | o) - min_k Q_k(x, a),                                 a ~ pi
    L_alpha = -log alpha (log pi(a | o) + H)

Policies are stochastic: a normal squashed by tanh, whose mean and deviation follow from the observation; of choices a
categorical. Of those nothing is drawn: critics say what each of an agent's own choices is worth beside the others' actions,
and expectations take the place of samples,

    V(o') = sum_a pi(a | o') (min_k Q'_k(x', a) - alpha log pi(a | o')).

`sac` (`isac` of teams) has critics of its own observation and action, `masac` (`--algo.critic world`) of everybody's; groups
of all kinds may play together (`algos/actorcritic.py`). Where a group's agents are paid alike and have one critic, its value is
theirs together: the entropies of all who act are in it.

Knobs, and what they do

  Entropy. Each agent's weight `alpha` moves until its policy's entropy is `target_entropy` (`alpha_auto`; else it stays): nats
  for each continuous dimension, of tanh's outside, and a share of the most there can be for each discrete one: `none` is -1
  and 0.2.

  All else as in `algos/ddpg.py`: critics, `others`, targets, memory, the first `random_steps`, `noise_keep`. It is evaluated by
  the mean, or the likeliest choice.

Metrics, for each group: those of `algos/ddpg.py` but for noise; and

    alpha                weight of the entropy, mean over agents
    entropy              of the policy, in nats; of samples where actions are continuous

Departures from the papers: those of `algos/ddpg.py`; deviations are held between e^-5 and e^2 by a tanh; actions of several
dimensions are worth the mean of their choices' values; of `n_step` steps the last alone has its entropy counted. Scores and
their commands: `benchmarks/scores.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algos.actorcritic import ActorCritic, Metrics, QValue
from shoal.algos.base import Seat
from shoal.algos.checks import bounded
from shoal.algos.optimiser import Optimiser
from shoal.algos.samples import Samples
from shoal.nets.heads import Net
from shoal.ops import losses, values
from shoal.ops.distributions import TanhNormal, make
from shoal.ops.schedules import Now
from shoal.spec import Box, UserError

LOW, HIGH = -5.0, 2.0  # what the logarithm of a deviation is held between


class Weights(nn.Module):
    """Logarithms of the entropies' weights, one an agent."""

    def __init__(self, n: int, first: float):
        super().__init__()
        self.log = nn.Parameter(torch.full((n,), first).log())


class SAC(ActorCritic):
    names = {"isac": {}, "masac": {"critic": "world"}}
    q_of_choices = True
    actor_metrics = (*ActorCritic.actor_metrics, "entropy")

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        critics: int = 2  # of which the lowest counts
        alpha: float = 0.2  # weight of the entropy, at first
        alpha_auto: bool = True  # it moves until the entropy is what was asked for
        target_entropy: float | None = None  # nats a continuous dimension, or share of the most a discrete one; none: -1, 0.2
        lr_alpha: float | None = None  # learning rate of alpha, with the critics' schedule; none: theirs

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {}, ("alpha", "lr_alpha"))

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c, share = self.config, not isinstance(self.space, Box)
        if share and c.target_entropy is not None and not 0 <= c.target_entropy <= 1:
            raise UserError(
                f"--algo.target-entropy is {c.target_entropy:g}: for the {self.space.kind} actions of {', '.join(self.groups)} "
                "it is a share of the most there can be, from 0 to 1."
            )
        self.noise = self.width
        self.weights = Weights(self.n, c.alpha).to(seat.device)
        critics = c.lr_critic or c.lr
        self.alpha_share = (c.lr_alpha or critics) / critics  # of the critics' rate, whose schedule it follows
        rate = critics * self.alpha_share
        self.alpha_optimiser = Optimiser([self.weights], rate, kernels=self.kernels, rule=c.step_rule) if c.alpha_auto else None

    def make_actor(self, generator: torch.Generator) -> Net:
        wide = self.width * (2 if isinstance(self.space, Box) else 1)  # means and deviations
        return Net(
            self.observations.encoder(generator), wide, self.observations.agents, self.net, generator, self.net.gain_actor
        )

    @property
    def alpha(self) -> Tensor:
        """[N]"""
        return self.weights.log.detach().exp()

    @property
    def entropy_weight(self) -> Tensor:
        """For the log."""
        return self.alpha.mean()

    def most_bonus(self) -> Tensor:
        """The most that an entropy is worth: of choices that are all as likely, or of actions even over their range."""
        most = self.width * math.log(2) if isinstance(self.space, Box) else sum(math.log(n) for n in self.space.sizes)
        return most * (self.alpha.sum() if self.as_one else self.alpha.amax())

    def _policy(self, params: Tensor, legal: Tensor | None) -> Any:
        if isinstance(self.space, Box):
            mean, spread = params.chunk(2, -1)
            return TanhNormal(mean, LOW + (HIGH - LOW) * 0.5 * (spread.tanh() + 1))
        return make(self.space, params, legal)

    def sample_action(self, params: Tensor, legal: Tensor | None, noise: Tensor | None, explore: bool) -> Tensor:
        pi = self._policy(params, legal)
        return pi.mode() if noise is None else pi.sample(noise)

    def next_action(self, params: Tensor, legal: Tensor | None, noise: Tensor) -> tuple[Tensor, Any]:
        pi = self._policy(params, legal)
        if isinstance(self.space, Box):
            return pi.path(noise)
        return values.one_hot(pi.sample(noise), self.space), (pi.probabilities(), pi.entropy())

    def next_value(self, q: Tensor, policy: Any, active: Tensor | None) -> Tensor:
        if isinstance(self.space, Box):
            bonus = -self.alpha * policy  # its log-probability
            if active is not None and (self.as_one or self.returns_after_death):
                bonus = torch.where(active, bonus, 0)
            return q + (bonus.sum(-1, keepdim=True) if self.as_one else bonus)
        chance, entropy = policy
        return values.expected(q, chance, self.space) + self.alpha * entropy

    def actor_loss(
        self, params: Tensor, legal: Tensor | None, noise: Tensor, q_value: QValue
    ) -> tuple[Tensor, Tensor, Metrics]:
        pi = self._policy(params, legal)
        if isinstance(self.space, Box):
            action, log_prob = pi.path(noise)
            metrics = {"entropy": -log_prob, "surplus": -log_prob - self._goal(None)}
            return self.alpha * log_prob, q_value(action).amin(0), metrics
        sample = values.one_hot(pi.sample(noise), self.space)
        q, entropy = q_value(sample).amin(0), pi.entropy()
        metrics = {"entropy": entropy, "surplus": entropy - self._goal(legal)}
        return -self.alpha * entropy, values.expected(q, pi.probabilities(), self.space), metrics

    def _goal(self, legal: Tensor | None) -> float | Tensor:
        """The entropy that is asked for, in nats, summed over dimensions."""
        asked = self.config.target_entropy
        if isinstance(self.space, Box):
            return self.width * (-1.0 if asked is None else asked)
        share = 0.2 if asked is None else asked
        if legal is None:
            return share * sum(math.log(n) for n in self.space.sizes)
        return share * sum(x.sum(-1).float().log() for x in legal.split(self.space.sizes, -1))

    def update_temperature(self, metrics: Metrics, mask: Tensor | None, keep: Tensor | None) -> None:
        surplus = metrics.pop("surplus")
        if self.alpha_optimiser is not None:
            loss = self.weights.log * surplus
            self.alpha_optimiser.descend(losses.masked_sum(loss, mask), losses.active_count(loss, mask), keep)

    def set_schedules(self, now: Now) -> None:
        super().set_schedules(now)
        if self.alpha_optimiser is not None:
            self.alpha_optimiser.rate.fill_(self._critic_rate(now) * self.alpha_share)

    def update(self, samples: Samples) -> Metrics:
        return {**super().update(samples), **self.metric_means({"alpha": self.alpha}, None)}
