"""PPO, IPPO and MAPPO (Schulman et al., 2017; de Witt et al., 2020; Yu et al., 2022): clipped policy gradients.

Every `rollout` steps the policy is moved for some epochs on what just happened, by

    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A) - w H(pi),    rho = pi(a | o) / pi_old(a | o),

with A from generalised advantage estimation, and the critic towards A + V. Old log-probabilities come from the rollout and
stay fixed. The names differ in what the critic sees: `ppo` and `ippo` an agent's own observation, `mappo` the whole world. A
central critic reads its input once and has a head for each agent, so that agents may be paid differently. How an update
goes, and what memory and chunks are, is in `algos/onpolicy.py`; what nets see in `algos/observations.py`; nets in `nets/`.

Knobs, and what they do

  Experience. `rollout` steps of each row, or so many whole `episodes` of each, are one update's. More rows steady the gradient,
  longer rollouts see further than the critic does. `chunk` steps of a row stay together in a minibatch: with memory, gradients
  go back so far. Episodes that end early leave steps over, for a rollout is as long as they can be: these are played and
  counted among the run's steps, nothing is learnt from them, and all rows begin the next rollout with new episodes.
  `random_steps` fill the first rollouts with any legal action; nothing is learnt before `learning_starts`.

  Returns. `gamma` discounts (0.95 where episodes are short: with 0.99 simple_spread stays near -11), `lam` trades the critic's
  bias for variance. Where episodes are long they see further: LunarLander after 500k steps 142 with gamma 0.99, lambda 0.95 and
  8 minibatches, 226 with 32 of them, 271 with 0.995, 0.98 and 32, the defaults there, 267 and 238 with 0.999 (seeds 0, 0, 1, 0
  and 1). CartPole with 0.99 and 0.95 was left again by some seeds (397, 479); with 0.995 and 0.98 all of seeds 8 to 17 stood at
  500. `time_limit` false takes what was cut off for the end, as some code does; values then depend on a clock that agents do
  not see. `reward_scale` and `normalise_reward` change what the critic must put out. A `shaper` changes what is paid:
  shaper(reward [T, B, N], obs, step, steps) -> reward, where step, a tensor, counts environment steps at the rollout's
  beginning; reported returns stay raw.

  What is seen. `normalise_obs` is for observations, `normalise_state` for what a critic sees of its team or the world, where
  that is to be otherwise. A `normaliser` of one's own (`nets/norm.py`) takes the place of those of observations, state and
  values, a `state_normaliser` that of the state's alone.

  Death. `after_death` says where the return of an agent that dies, or leaves, ends. own: with the agent. team: with its
  team's episode (it is over, or nobody of the team is left), so that what its death earns the others is its own gain. It then
  earns what the living of its team are paid on average, and its value is learnt, of zeros and its id (a central critic sees
  the living); so is that of agents that have not arrived yet. Policy losses, entropies and advantages are the living's alone.
  auto is team where a team's agents are paid alike, as with `--reward team-mean`, else own. In turn-based worlds an agent's
  last turn collects what its team is paid until the end, and is left out where a rollout ends before.

  The policy's step. `epochs` of `minibatches`: more of them use data longer, and move further from it. `minibatch_episodes` 10
  takes ten whole episodes for each instead, through the shuffled epochs end to end, and leaves out what is left at the end: 4
  epochs of 64 episodes are 25 minibatches. `clip` bounds how far a ratio is followed, `kl_stop` ends the actor's steps of an
  update, and `lr_schedule kl` moves the rate to keep the divergence near a target, by `lr_kl_factor` and between `lr_kl_least`
  and `lr_kl_most`. `entropy` keeps the policy from settling, from a maximum to a minimum if it has a schedule.
  `advantage_scope` normalises advantages over a minibatch (batch), the rollout of the group, or that of each agent; agents
  that are paid on unlike scales want the last. `advantage_every` computes them anew as the critic learns.

  The critic. `critic` own, team or world; `critic_input` its state, the joined observations, or for each agent the state beside
  its own observation. `value_clip`, `huber`, `value_weight` shape its loss; `lr_critic` its rate; `target_tau` takes values
  from a slow copy. `critic_slices` 10 trains it first, in ten slices of time from the last to the first, towards targets that
  stay; the advantage then is the target less the value predicted just before that slice's step. With `advantage_every`
  minibatch the slices are of every minibatch, of `minibatch_episodes` or chunks: targets are computed anew, the critic takes a
  step for each slice, the actor one on advantages that are normalised over the minibatch. A critic that fits those episodes
  (explained variance 0.9) leaves them only noise for advantages, and the policy drifts away: with 250 such steps on 64
  episodes simple_spread fell from -500 to -1,900. Without the normaliser of values (`--algo.normalise-value false`) it learns
  slowly enough.

  Both. `lr`, its schedule (constant, linear, cosine, exponential, exponential:0.999/update, one of PyTorch's as
  StepLR:step_size=100,gamma=0.5, a class of yours) and `lr_last`; `optimiser` adamw, adam, rmsprop or sgd with `beta1`,
  `beta2`, `eps`, `momentum`; `weight_decay`; `grad_clip`. `--net.*`: widths, activations, layer norm, gains, sharing, one
  trunk for both, memory, attention, convolutions, bf16, or a module of yours. Every knob but the rollout's length can be set
  for one group: `--algo.adversary.lr 1e-3`.

  `--net.trunk shared` has one encoder, hidden layers and memory for both, over an agent's own observation, and both losses move
  them, the critic's by `value_weight`. A critic that sees no more is one more output of it. A central one has a head of its own
  (`--net.critic-hidden`, by default one layer) over the trunk's features and the state of its team or the world. It takes
  `critic_input` agent: in the state alone, or in all observations joined, no part is the agent's own for a trunk to run over.

Defaults follow from the world (`algos/defaults.py`) and were chosen on fourteen tasks (docs/defaults.md). A rate that falls to
zero is what makes a run end at its best: with a constant one CartPole was left and found again. On simple_spread there is a
plateau near -13.5, where agents do not split the landmarks among themselves. What leaves it: gamma 0.95, a large `lr` that
falls, and ten epochs of four minibatches; four epochs end 2 behind after 2M steps, one minibatch 2.6.

Metrics, for each group

    policy_loss          the clipped loss above, without the entropy; near zero, for advantages have mean zero
    value_loss           of the critic, in the normaliser's units; rises when the policy finds something new
    entropy              of the policy, in nats
    entropy_loss         minus the entropy's weight times it
    kl                   from the old policy to the new one, approximately (Schulman's k3): 0.005 to 0.02 is usual
    clip_fraction        share of the ratios beyond the clip: 0.05 to 0.2 is usual, more asks for fewer epochs or a smaller rate
    explained_variance   of the returns, by the values before the update: 1 is perfect, 0 no better than their mean
    std                  of continuous actions, before squashing
    grad_norm_actor      before clipping
    grad_norm_critic     before clipping
    grad_norm            with a shared trunk: of both together
    learning_rate        of the actor
    kept                 with kl_stop: the share of the actor's steps that were taken

They are means over the steps of the updates since the last line.

Departures from the papers: Adam's epsilon is 1e-5, and decay is AdamW's; time limits are bootstrapped exactly, from the value
of the true last observation; the value loss has a net and a rate of its own unless the trunk is shared; the entropy of a
squashed normal is that of the normal inside; statistics of observations move after the update, so that every ratio begins at
one; kl_stop stops the actor alone (with a
shared trunk, both). Scores and the commands that reached them: `benchmarks/scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.algos import defaults
from shoal.algos.base import Seat
from shoal.algos.checks import bounded
from shoal.algos.onpolicy import Metrics, Minibatch, OnPolicy
from shoal.algos.samples import Samples, by_episode
from shoal.algos.slices import update_critic_in_slices
from shoal.buffers.minibatches import end_to_end
from shoal.ops import losses, schedules
from shoal.ops.schedules import Now
from shoal.spec import UserError


class PPO(OnPolicy):
    names = {"ippo": {"critic": "own"}, "mappo": {"critic": "world"}}
    measures_kl = True

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        rules: ClassVar[defaults.Rules] = {**OnPolicy.Config.rules, "minibatches": defaults.minibatches}

        epochs: int = 10  # passes over a rollout
        minibatches: int | None = (
            None  # pieces of a pass, of whole steps and all agents; none: 4 of teams, 8 of one agent, 32 beyond 500 steps
        )
        minibatch_episodes: int | None = (
            None  # instead of `minibatches`: minibatches of so many of the `episodes`, drawn through the epochs end to end
        )
        clip: float = 0.2  # how far a ratio may move and still count
        clip_schedule: str = "constant"  # as lr_schedule, without kl
        clip_last: float = 0.0  # share of the clip that its schedule ends at
        value_clip: float | None = 0.2  # how far a (normalised) value may move in an update; none: as far as it likes
        lr_kl_factor: float = 1.5  # with lr_schedule kl: what the rate is multiplied by where the policy moves too little
        lr_kl_least: float = 1e-6  # and what it stays above
        lr_kl_most: float = 1e-2  # and below
        kl_stop: float | None = None  # no further step of the actor in an update once it moved so far; none: all steps
        advantage_every: Literal["rollout", "epoch", "minibatch"] = "rollout"  # how often advantages are computed anew

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"lr_kl_factor": (1.0, 1e30)}, ("lr_kl_least", "lr_kl_most"))
            for name in ("lr_kl_factor", "lr_kl_least", "lr_kl_most"):
                if getattr(self, name) != getattr(PPO.Config, name) and not self.lr_schedule.startswith("kl"):
                    flag = f"--algo.{name.replace('_', '-')}"
                    raise UserError(f"{flag} is for --algo.lr-schedule kl, which is {self.lr_schedule}.")
            if self.lr_kl_least > self.lr_kl_most:
                raise UserError(
                    f"--algo.lr-kl-least is {self.lr_kl_least:g}, more than the {self.lr_kl_most:g} of --algo.lr-kl-most."
                )
            if self.lr_schedule.startswith("kl") and self.epochs == 1 and self.minibatches == 1:
                raise UserError(
                    f"--algo.lr-schedule {self.lr_schedule} needs more than one step an update to see how far it moved."
                )
            if self.minibatch_episodes is not None and self.episodes is None:
                raise UserError(
                    f"--algo.minibatch-episodes is {self.minibatch_episodes}, and rollouts are not of whole episodes: say by "
                    "--algo.episodes how many each row plays."
                )
            if self.minibatch_episodes is not None and isinstance(self.chunk, int):
                raise UserError(
                    f"--algo.chunk is {self.chunk}, and --algo.minibatch-episodes keeps whole episodes together: leave one of "
                    "them."
                )

    clip: Tensor

    def __init__(self, seat: Seat):
        super().__init__(seat)
        c = self.config
        self.value_clip, self.kl_stop, self._clip = c.value_clip, c.kl_stop, self.schedule("clip")
        self.register_buffer("clip", torch.tensor(c.clip, device=self.warmup.device))
        if c.minibatch_episodes is not None:
            self.chunk = self.steps // c.episodes
        self.slices_in_minibatch = self.slices > 0 and c.advantage_every == "minibatch"
        if self.slices_in_minibatch and self.chunk == 1 and not self._whole:
            raise UserError(
                "--algo.critic-slices with --algo.advantage-every minibatch slices the time of minibatches, and these are of "
                "single steps: give --algo.episodes and --algo.minibatch-episodes, or --algo.chunk all."
            )

    def set_schedules(self, now: Now) -> None:
        super().set_schedules(now)
        self.clip.fill_(self._clip(now))

    def draws(self, steps: int, rows: int) -> int:
        return 0 if self._whole else self.config.epochs * (steps // self.chunk) * rows

    @property
    def _whole(self) -> bool:
        """Whether every step is taken on the whole rollout."""
        return self.config.minibatches == 1 and self.config.minibatch_episodes is None

    def _orders(self, noise: Tensor | None) -> list[tuple[Tensor | None, int]]:
        """For each epoch the chunks in the order in which they are taken, and in how many minibatches."""
        c = self.config
        if self._whole:
            return [(None, 1)] * c.epochs
        assert noise is not None
        orders = noise.reshape(c.epochs, -1).argsort(-1)
        if c.minibatch_episodes is not None:
            return [*end_to_end(orders, c.minibatch_episodes)]
        return [(order, c.minibatches) for order in orders]

    def update(self, samples: Samples) -> Metrics:
        c, every = self.config, self.config.advantage_every
        if c.minibatch_episodes is not None and samples.filled is not None:
            samples = by_episode(samples, c.episodes)
        batch, metrics = self.prepare(samples)
        keep = self.learning if c.learning_starts or c.kl_stop is not None else None
        steps: list[Metrics] = []
        for epoch, (order, count) in enumerate(self._orders(samples.noise)):
            if epoch and every == "epoch":
                self.compute_advantages(samples, batch)
            critic_metrics: Metrics = {}
            if self.slices and every != "minibatch":
                critic_metrics = update_critic_in_slices(self, batch, not epoch or every == "epoch")
            for k, minibatch in enumerate(self.minibatches(batch, count, order, self.slices_in_minibatch)):
                if every == "minibatch" and (epoch or k):
                    self.compute_advantages(samples, batch)
                    minibatch = self.minibatches(batch, count, order, self.slices_in_minibatch)[k]
                if self.slices_in_minibatch:
                    critic_metrics = update_critic_in_slices(self, minibatch)
                    minibatch = minibatch.with_first_memory()
                step_metrics, keep = self.update_minibatch(minibatch, keep)
                steps.append({**step_metrics, **critic_metrics})
            if self.lr_kl is not None and len(steps) > 1:  # before the first step nothing has moved
                self._adapt_rate(steps[-k - 1 :], batch.active)
        return self.finish(samples, steps, metrics)

    def actor_loss(self, log_prob: Tensor, entropy: Tensor, batch: Minibatch) -> tuple[Tensor, Metrics]:
        old, advantage, active = batch.log_prob, batch.advantage, batch.active
        how = self.clip, self.entropy_weight, self.kernels, self.metric_agents
        return losses.ppo(log_prob, entropy, old, advantage, active, *how)

    def _adapt_rate(self, steps: list[Metrics], active: Tensor | None) -> None:
        """A learning rate that aims at a divergence an epoch. It stays where no step was taken, or from random actions."""
        kl, rate = torch.stack([s["kl"] for s in steps]).mean(), self.actor_optimiser.rate
        moved = self.learning & ~self.warmup & (True if active is None else active.any())
        c, target = self.config, self.lr_kl or 0.0
        adapted = schedules.kl_adapted(rate, kl, target, c.lr_kl_factor, c.lr_kl_least, c.lr_kl_most)
        self._set_rate(adapted.where(moved, rate))
