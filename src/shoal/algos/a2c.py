"""A2C, IA2C and MAA2C (Mnih et al., 2016; Papoudakis et al., 2021): plain policy gradients, one step a rollout.

All rows act for `rollout` steps, and then actor and critic take one step on all of it,

    L = -A log pi(a | o) - w H(pi),

with A from generalised advantage estimation (`lam` 1: from returns of as many steps as the rollout has), and the critic
towards A + V. It is PPO with one epoch, one minibatch and so no ratio to clip (Huang et al., 2022). `a2c` and
`ia2c` have a critic that sees an agent's own observation, `maa2c` one that sees the world.

Its knobs are those of `algos/ppo.py`, less the ones of epochs, ratios and divergence: after one step there is nothing to
clip, and so no `lr_schedule kl` either. Steps are few: it wants many of them, and a larger `lr`. Rollouts of five to ten
steps are poor where all rows go through their episodes in step, as in the particle worlds: each update then sees one part of an
episode alone (simple_spread, 50M steps: about -8 with 25 steps, -15 and worse with 5). Where episodes are long they are best.

The critic has a larger rate than the actor, 1e-2: with one and the same it takes too few steps to follow the policy, and what
stood at 500 on CartPole was left again (last of 300k steps, gamma 0.99 and lambda 0.95, seeds 0 to 2: 500, 393, 400; with 1e-2
500 three times, as with four slices of the critic).

Metrics, for each group: those of `algos/ppo.py` but for kl, clip_fraction, kept; and

    policy_loss          the loss above, without the entropy

Departures from the papers: rollouts are longer; rows step together instead of in threads; AdamW with an epsilon of 1e-5
instead of RMSprop; advantages are normalised over the rollout unless `advantage_scope` is none; the rest as PPO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algos import defaults
from shoal.algos.onpolicy import Metrics, Minibatch, OnPolicy
from shoal.algos.samples import Samples
from shoal.algos.slices import update_critic_in_slices
from shoal.ops import losses


class A2C(OnPolicy):
    names = {"ia2c": {"critic": "own"}, "maa2c": {"critic": "world"}}

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        rules: ClassVar[defaults.Rules] = {**OnPolicy.Config.rules, "rollout": defaults.short_rollout, "lr": defaults.step_size}

        rollout: int | None = None  # steps between updates; none: an episode's where it lasts at most 50, else 8
        lr: float | None = None  # learning rate; none: 5e-3 of teams, 2e-3 of one agent
        lr_critic: float | None = 1e-2  # learning rate of the critic; none: the same

    def update(self, samples: Samples) -> Metrics:
        batch, metrics = self.prepare(samples)
        critic_metrics = update_critic_in_slices(self, batch) if self.slices else {}
        (whole,) = self.minibatches(batch)
        step_metrics, _ = self.update_minibatch(whole, self.learning if self.config.learning_starts else None)
        return self.finish(samples, [{**step_metrics, **critic_metrics}], metrics)

    def actor_loss(self, log_prob: Tensor, entropy: Tensor, batch: Minibatch) -> tuple[Tensor, Metrics]:
        return losses.a2c(log_prob, entropy, batch.advantage, batch.active, self.entropy_weight, self.metric_agents)
