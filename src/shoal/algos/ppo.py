"""PPO, IPPO and MAPPO (Schulman et al., 2017; de Witt et al., 2020; Yu et al., 2022): clipped policy gradients.

Every `rollout` steps the policy is moved for some epochs on what just happened, by

    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A) - w H(pi),    rho = pi(a | o) / pi_old(a | o),

with A from generalised advantage estimation (`ops/returns.py`), and the critic towards A + V. Old log-probabilities come
from the rollout and stay fixed; advantages are computed once a rollout, over active agents. The names differ in what the
critic sees: `ppo` and `ippo` an agent's own observation, `mappo` the whole world (`--algo.critic own|team|world`). A
central critic reads its input once and has a head for each agent, so that agents may be paid differently.

Metrics, for each group: policy_loss, value_loss, entropy, kl (approximate, old to new), clip_fraction (of the ratios),
explained_variance (of the returns, by the values before the update), grad_norm_actor and grad_norm_critic (before
clipping), learning_rate.

Departures from the papers: Adam's epsilon is 1e-5; time limits are bootstrapped exactly, from the value of the true last
observation; the entropy of a squashed normal is that of the normal inside; observation statistics move after the update,
so that every ratio begins at one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shoal.algos.base import Algorithm, Optimiser, Rollout, Scope, flat, scope_groups, scope_input, scope_width, width_of
from shoal.nets.heads import Actor, Critic
from shoal.nets.layers import NetConfig
from shoal.nets.norm import CLIP, Running
from shoal.ops import losses
from shoal.ops.distributions import noise_of
from shoal.ops.returns import gae, unsettled_turns
from shoal.ops.schedules import scheduled
from shoal.spec import Batch, EnvSpec, Frame, Group, UserError

SLAB = 1 << 17  # moments evaluated at once when values are computed


class PPO(Algorithm):
    names = {"ippo": {"critic": "own"}, "mappo": {"critic": "world"}}

    @dataclass(frozen=True)
    class Config:
        rollout: int = 25  # steps between updates
        epochs: int = 4  # passes over a rollout
        minibatches: int = 4  # pieces of a pass; a piece holds whole moments, all agents of the group
        gamma: float = 0.99  # discount
        lam: float = 0.95  # GAE's lambda
        clip: float = 0.2  # how far a ratio may move and still count
        value_clip: float | None = 0.2  # how far a (normalised) value may move in an update; none: as far as it likes
        huber: float | None = None  # value errors beyond this count linearly; none: squared errors
        entropy: float = 0.01  # weight of the entropy bonus
        lr: float = 7e-4  # learning rate
        lr_critic: float | None = None  # learning rate of the critic; none: the same
        lr_schedule: Literal["constant", "linear", "cosine", "exponential"] = "constant"  # learning rate over the run
        lr_last: float = 0.0  # share of the learning rate that a schedule ends at
        weight_decay: float = 0.0  # decoupled, as in AdamW
        grad_clip: float | None = 0.5  # norm beyond which gradients are scaled down; none: never
        critic: Scope = "own"  # what the critic sees: own observation, the team's or the world's
        normalise_advantage: bool = True  # mean 0, deviation 1 over the active agents of a rollout
        normalise_value: bool = True  # the critic learns returns of mean 0 and deviation 1
        normalise_obs: bool = True  # observations of mean 0 and deviation 1, by running statistics
        squash: bool = False  # continuous actions: tanh into the bounds; else they are clipped
        log_std: float = 0.0  # continuous actions: log of the first standard deviation

        def __post_init__(self) -> None:
            positive = ("rollout", "epochs", "minibatches", "lr", "lr_critic", "clip", "value_clip", "huber", "grad_clip")
            bounds = {
                **dict.fromkeys(positive, (1e-30, 1e30)),
                **dict.fromkeys(("gamma", "lam", "lr_last"), (0, 1)),
                **dict.fromkeys(("entropy", "weight_decay"), (0, 1e30)),
                "log_std": (-5, 2),
            }
            for name, (low, high) in bounds.items():
                value = getattr(self, name)
                if value is not None and not low <= value <= high:
                    must = "more than zero" if name in positive else f"between {low} and {high:g}"
                    raise UserError(f"--algo.{name.replace('_', '-')} is {value}: it must be {must}.")

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
        self.feed, self.noise = Rollout(c.rollout), noise_of(self.space)
        self.central = c.critic != "own"
        if c.critic == "team" and len({spec[g].team for g in groups}) > 1:
            raise UserError(f"a critic that sees its team cannot serve {' and '.join(groups)}, which are of several teams.")
        seen = scope_width(spec, groups, c.critic)
        self.actor = Actor(width_of(spec[groups[0]]), self.space, self.n, net, generator, c.squash, c.log_std)
        self.critic = Critic(seen, self.n, net, generator, self.central)
        self.value_norm = Running() if c.normalise_value else None
        looked_at = {*groups, *(g.name for g in scope_groups(spec, groups, c.critic))} if c.normalise_obs else ()
        self.obs_norms = nn.ModuleDict({g.name: Running(width_of(g)) for g in spec.groups if g.name in looked_at})
        self.state_norm = Running(spec.state) if c.normalise_obs and c.critic == "world" and spec.state else None
        self.to(device)
        self.actor_optimiser = Optimiser([self.actor], c.lr, c.weight_decay, c.grad_clip)
        self.critic_optimiser = Optimiser([self.critic], c.lr_critic or c.lr, c.weight_decay, c.grad_clip)

    # --- acting ---

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        at = frame[self.groups[0]].acts.dim() - 1
        pi = self.actor(self._obs(frame, at), self.joined(lambda g: frame[g].legal, at))
        if noise is None:
            return self.parted(pi.mode(), at), memory, {g: {} for g in self.groups}
        actions, log_prob = pi.draw(self.joined(noise.__getitem__, at))
        extras = {g: {"log_prob": x} for g, x in self.parted(log_prob, at).items()}
        return self.parted(actions, at), memory, extras

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        return self.config.epochs * steps * rows

    def tune(self, progress: float) -> None:
        c = self.config
        share = scheduled(c.lr_schedule, 1.0, c.lr_last, progress)
        self.actor_optimiser.rate.fill_(c.lr * share)
        self.critic_optimiser.rate.fill_((c.lr_critic or c.lr) * share)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        c, mask = self.config, self.mask(batch)
        with torch.no_grad():
            unsettled = self._unsettled(batch)
            mask = mask if mask is None or unsettled is None else mask & ~unsettled
            obs, seen = self._obs(batch.frame, 2), self._seen(batch.frame)
            before = self._critic(seen)  # in the normaliser's units of now, in which the critic goes on speaking
            value = self._denormalised(before)
            advantage = self._advantage(batch, value)
            target = advantage + value
            variance = losses.explained_variance(value, target, mask)
            if self.value_norm is not None:
                self.value_norm.update(target, mask)
                target = self.value_norm.normalise(target)
            if c.normalise_advantage:
                advantage = losses.normalise(advantage, mask)
            data = {
                "obs": obs,
                "seen": seen if self.central else None,  # else the same as obs
                "action": self.joined(lambda g: batch.actions[g], 2),
                "log_prob": self.joined(lambda g: batch.extras[g]["log_prob"], 2),
                "legal": self.joined(lambda g: batch.frame[g].legal, 2),
                "advantage": advantage,
                "value": before,
                "target": target,
                "mask": mask,
            }
            data = {k: x.flatten(0, 1) for k, x in data.items() if x is not None}  # [T B, N, ...]: a moment is a sample
            moments = advantage.shape[0] * advantage.shape[1]
            assert batch.noise is not None
            orders = batch.noise.reshape(c.epochs, moments).argsort(-1)
        steps = []
        for order in orders:
            pieces = {k: x.index_select(0, order).tensor_split(min(c.minibatches, moments)) for k, x in data.items()}
            steps += [self._descend(dict(zip(pieces, piece, strict=True))) for piece in zip(*pieces.values(), strict=True)]
        for g in self.spec.groups:  # after the update, so that its ratios began at one
            if g.name in self.obs_norms:
                view = batch.frame[g.name]
                cast(Running, self.obs_norms[g.name]).update(flat(view.obs, g), view.alive if g.mortal else None)
        if self.state_norm is not None and batch.frame.state is not None:
            self.state_norm.update(batch.frame.state)
        metrics = {k: torch.stack([s[k] for s in steps]).mean() for k in steps[0]}
        return {**metrics, "explained_variance": variance, "learning_rate": self.actor_optimiser.rate.clone()}

    def _descend(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step of actor and critic on one minibatch."""
        c, mask = self.config, data.get("mask")
        pi = self.actor(data["obs"], data.get("legal"))
        log_prob, entropy = pi.log_prob_and_entropy(data["action"])
        old, advantage = data["log_prob"], data["advantage"]
        actor_loss, means = losses.ppo(log_prob, entropy, old, advantage, mask, c.clip, c.entropy, self.fused)
        value = self.critic(data["seen"] if self.central else data["obs"])
        critic_loss, mean = losses.value(value, data["value"], data["target"], mask, c.value_clip, c.huber, self.fused)
        count = log_prob.numel() if mask is None else mask.sum()
        keep = None if isinstance(count, int) else count > 0  # nobody active: no step, for Adam would go on moving
        grad_actor = self.actor_optimiser.descend(actor_loss, count, keep)
        grad_critic = self.critic_optimiser.descend(critic_loss, count, keep)
        return {**means, **mean, "grad_norm_actor": grad_actor, "grad_norm_critic": grad_critic}

    def _advantage(self, batch: Batch, value: Tensor) -> Tensor:
        c = self.config
        reward = self.joined(lambda g: batch.paid[g], 2)
        terminated, cut = self._ends(batch)
        acts = self.joined(lambda g: batch.frame[g].acts, 2) if self.spec.turns else None
        unsettled = self._unsettled(batch)
        return gae(reward, value, self.values(batch.next), terminated, cut, c.gamma, c.lam, acts, unsettled, self.fused)

    def _ends(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[T, B, N] who terminated, and whose trace is cut: the episode is over, or the agent is gone from the next frame."""
        terminated = self.joined(lambda g: batch.pays[g].terminated, 2)
        cut = batch.over[..., None].expand_as(terminated)
        return terminated, cut | ~self.joined(lambda g: batch.next[g].alive, 2) if self.uneven else cut

    def _unsettled(self, batch: Batch) -> Tensor | None:
        """[T, B, N] turns of which too little is known to learn from, in turn-based worlds."""
        if not self.spec.turns:
            return None
        terminated, cut = self._ends(batch)
        acts = self.joined(lambda g: batch.frame[g].acts, 2)
        turn_tp1 = self.joined(lambda g: batch.next[g].acts | ~batch.next[g].alive, 2)  # the gone left a last observation
        return unsettled_turns(terminated, terminated | cut, acts, turn_tp1)

    def values(self, frame: Frame) -> Tensor:
        """V of a batch's frames in the reward's own units: [T, B, N]."""
        return self._denormalised(self._critic(self._seen(frame)))

    def _critic(self, seen: Tensor) -> Tensor:
        return torch.cat([self.critic(x) for x in seen.split(max(1, SLAB // seen.shape[1]))])

    def _denormalised(self, value: Tensor) -> Tensor:
        return value if self.value_norm is None else self.value_norm.denormalise(value)

    def _prepared(self, obs: Any, group: Group) -> Tensor:
        """[..., N, *O] -> float [..., N, width], normalised."""
        obs = flat(obs, group)
        if group.name not in self.obs_norms:
            return obs
        return cast(Running, self.obs_norms[group.name]).normalise(obs, CLIP)

    def _obs(self, frame: Frame, agents_at: int) -> Tensor:
        return self.joined(lambda g: self._prepared(frame[g].obs, self.spec[g]), agents_at)

    def _seen(self, frame: Frame) -> Tensor:
        """What the critic sees: [T, B, N, O], or [T, B, S] where it is central."""
        if not self.central:
            return self._obs(frame, 2)
        seen = scope_input(self.spec, self.groups, self.config.critic, frame, self._prepared)
        return seen if self.state_norm is None else self.state_norm.normalise(seen, CLIP)
