"""The prepared batch: what a learner learns from, with all bookkeeping done.

A rollout, or sequences drawn from the replay, for the groups of one learner, agents side by side: [T, B, N, ...]. Decided here,
once for all algorithms: who is in a loss (`active`, `valued`), where a return ends (`terminated`, `cut`, with time limits and
deaths in them), what was earned (`reward`: scaled, normalised, of the dead their team's), what memory starts from. Everything
is computed when it is first asked for: captured and recorded updates hold nothing unused. A mask that is none means everybody,
always.

    samples.actor_input      what actors see                 samples.unroll(net, x, memory)   a net over the sequence
    samples.critic_input     what critics see                samples.after(net, x, memory)    one step on, in the next frames
    samples.next_...         the same in the next frames     samples[g]                       the same for one group alone

Of a sequence that begins with a burn-in, inputs of nets are of all its steps, and everything else of those after it. `batch` is
what happened, raw: for peers, who have normalisers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleDict

from shoal.algos import deaths, recurrence
from shoal.algos.base import Algorithm
from shoal.algos.observations import Observations
from shoal.buffers.minibatches import episode_steps
from shoal.ops.turns import unsettled_turns
from shoal.spec import Batch, Frame
from shoal.tree import cat_groups, tree_leaves, tree_map, zero_where

SLAB = 1 << 17  # frames evaluated at once when values are computed


class Samples:
    def __init__(self, learner: Algorithm, batch: Batch, group: str | None = None, whole: Samples | None = None):
        self.learner, self.batch, self.spec, self.config = learner, batch, learner.spec, learner.config
        self.groups = learner.groups if group is None else (group,)
        self.whole = self if whole is None else whole  # of all groups of the learner
        self.later = batch if not learner.burn_in else after_burn_in(batch, learner.burn_in)  # the burn-in left out
        self.frame, self.noise, self.weight = self.later.frame, batch.noise, batch.weight
        self.values_dead = learner.returns_after_death and not learner.as_one
        self.filled = None if self.later.filled is None else self.later.filled[..., None]  # [T, B, 1] what belongs; none: all
        known: Any = getattr(learner, "observations", None)  # one for all groups, or one for each
        self.observations: Observations = known[self.groups[0]] if isinstance(known, ModuleDict) else known  # type: ignore[assignment]
        self._parts: dict[str, Samples] = {}
        self._normalised: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # of these frames, and of the next

    def __getitem__(self, group: str) -> Samples:
        if group not in self._parts:
            self._parts[group] = Samples(self.learner, self.batch, group, self)
        return self._parts[group]

    def cat(self, part: Callable[[str], Any]) -> Any:
        return cat_groups(self.groups, part, 2)

    # --- what nets see ---

    @cached_property
    def next_frame(self) -> Frame:
        """The true next frames, as values see them."""
        if self.whole is not self:
            return self.whole.next_frame
        return deaths.next_frame(self) if self.values_dead else self.later.next

    @cached_property
    def actor_input(self) -> Any:
        return self.observations.actor_input(self.batch.frame, self._normalised[0])

    @cached_property
    def critic_input(self) -> Any:
        if not self.observations.central:
            return self.actor_input
        return self.observations.critic_input(self.batch.frame, self._normalised[0])

    @cached_property
    def next_actor_input(self) -> Any:
        return self.observations.actor_input(self.next_frame, self._normalised[1])

    @cached_property
    def next_critic_input(self) -> Any:
        if not self.observations.central:
            return self.next_actor_input
        return self.observations.critic_input(self.next_frame, self._normalised[1])

    @cached_property
    def legal(self) -> Tensor | None:
        return self.cat(lambda g: self.frame[g].legal)

    @cached_property
    def next_legal(self) -> Tensor | None:
        return self.cat(lambda g: self.next_frame[g].legal)

    # --- what was done, and who counts ---

    @cached_property
    def action(self) -> Tensor:
        """[T, B, N] or [T, B, N, D]."""
        return self.cat(partial(deaths.action, self) if self.values_dead else self.later.actions.__getitem__)

    def extra(self, name: str) -> Tensor:
        """[T, B, N, ...] what `act` left beside each action."""
        return self.cat(lambda g: self.batch.extras[g][name].detach())

    @cached_property
    def active(self) -> Tensor | None:
        """[T, B, N] who acts: in policy losses, entropy and statistics of advantages."""
        return self.active_mask if self.learner.has_inactive or self.filled is not None else None

    @cached_property
    def active_mask(self) -> Tensor:
        """The same, never none."""
        active = self.cat(lambda g: self.frame[g].active)
        return active if self.filled is None else active & self.filled

    @cached_property
    def alive(self) -> Tensor | None:
        return self.cat(lambda g: self.frame[g].alive) if self.learner.has_inactive else None

    @cached_property
    def reward_mask(self) -> Tensor | None:
        """[T, B, N] whose rewards are in statistics: those of the living, for rewards may come out of turn."""
        if self.filled is None:
            return self.alive
        return self.cat(lambda g: self.frame[g].alive) & self.filled

    @cached_property
    def valued(self) -> Tensor | None:
        """[T, B, N] whose values are learnt."""
        return deaths.valued(self) if self.learner.returns_after_death and not self.spec.turns else self.active

    @cached_property
    def goes_on(self) -> Tensor | None:
        """[T, B, N] whose next frame may be worth something: whoever was or is there and did not terminate, and who was born
        again at once."""
        return self.cat(lambda g: deaths.goes_on(self.later, g)) if self.learner.has_inactive else None

    # --- rewards, and where returns end ---

    @cached_property
    def scaled_reward(self) -> Tensor:
        """[T, B, N] what was paid, scaled."""
        paid = partial(deaths.reward, self) if self.learner.returns_after_death else self.later.learner_reward.__getitem__
        reward, scale = self.cat(paid), self.config.reward_scale
        return reward if scale == 1 else reward * scale

    @cached_property
    def reward(self) -> Tensor:
        """[T, B, N] what is learnt from, by the statistics as they are when it is first asked for."""
        norm = self.learner.reward_norm
        return self.scaled_reward if norm is None else norm.divide(self.scaled_reward)

    @cached_property
    def terminated(self) -> Tensor:
        """[T, B, N] whose return ends with this step, not bootstrapped; `time_limit` false: where truncated as well."""
        team = self.learner.returns_after_death
        terminated = self.cat(lambda g: deaths.team_ends(self, g)[0] if team else self.later.results[g].terminated)
        return terminated if self.config.time_limit else terminated | self.cut

    @cached_property
    def cut(self) -> Tensor:
        """[T, B, N] where a trace is cut: the episode is over, terminated or truncated, or the agent is gone."""
        if self.learner.returns_after_death:
            return self.cat(lambda g: deaths.team_ends(self, g)[1])
        over = self.later.over[..., None].expand_as(self.scaled_reward)
        return over | ~self.cat(lambda g: self.later.next[g].alive) if self.learner.has_inactive else over

    @cached_property
    def next_turn(self) -> Tensor:
        """[T, B, N] whose V(next) says something: those to move, and the gone, who left a last observation."""
        if self.learner.returns_after_death:
            return self.cat(partial(deaths.next_turn, self))
        return self.cat(lambda g: self.later.next[g].active | ~self.later.next[g].alive)

    @cached_property
    def unsettled(self) -> Tensor | None:
        """[T, B, N] turns of which too little is known to learn from, in turn-based worlds."""
        if not self.spec.turns:
            return None
        return unsettled_turns(self.terminated, self.terminated | self.cut, self.active_mask, self.next_turn)

    @property
    def turns(self) -> tuple[Tensor | None, Tensor | None]:
        """Whose turn it is, and the unsettled ones, for `gae`; none where all move at once."""
        return (self.active, self.unsettled) if self.spec.turns else (None, None)

    # --- memory: zero where agents start ---

    @cached_property
    def memory(self) -> Any:
        """The memory before the first step: a tree of [B, N, ...]."""
        return cat_groups(self.groups, self.batch.memory.__getitem__, 1)

    @cached_property
    def start(self) -> Tensor:
        """[burn-in and T, B, N] where agents start."""
        return self.cat(lambda g: self.batch.frame[g].start)

    @cached_property
    def remembers(self) -> Tensor | None:
        """[burn-in and T, B, N] whose memory goes on."""
        if not (self.learner.recurrent and self.learner.has_inactive):
            return None
        return self.cat(lambda g: self.learner.remembers(self.batch.frame[g]))

    @cached_property
    def next_start(self) -> Tensor:
        return self.cat(lambda g: self.next_frame[g].start)

    @cached_property
    def next_remembers(self) -> Tensor | None:
        """[T, B, N] whose memory goes on in the next frames: that of those to move, and of the gone."""
        if not (self.learner.recurrent and self.learner.has_inactive):
            return None
        return self.cat(lambda g: self.next_frame[g].active | ~self.next_frame[g].alive)

    def unroll(self, net: Callable[..., Any], x: Any, memory: Any, *when: Tensor | None) -> Any:
        """What a net gives of the inputs `x` [burn-in and T, ...] after the burn-in, and its memory after each of those steps.
        `when`: where memory is zeroed and whose goes on, if not as the agents' own."""
        if not self.learner.recurrent:
            return net(x)
        return recurrence.unroll(self, net, x, memory, *(when or (self.start, self.remembers)))

    def after(self, net: Callable[..., Any], x: Any, memory: Any, *when: Tensor | None) -> Any:
        """What a net gives of the next frames' inputs, one step on from its memory after each step; no gradient goes back."""
        if not self.learner.recurrent:
            return net(x)
        start, remembers = when or (self.next_start, self.next_remembers)
        return net(x, zero_where(start, tree_map(torch.detach, memory)), None, remembers)  # type: ignore[arg-type]


def after_burn_in(batch: Batch, burn_in: int) -> Batch:
    """What of a batch goes by steps, without the first so many."""
    b = batch
    steps = Batch(b.frame, b.next, b.actions, b.results, b.over, {}, {}, b.learner_reward, filled=b.filled)
    return tree_map(lambda x: x[burn_in:], steps)


def by_episode(samples: Samples, count: int) -> Samples:
    """A rollout whose rows each begin with `count` whole episodes, an episode a row: [longest, count * B, N, ...], `filled` as
    far as each goes. No memory comes from before an episode."""
    learner, b = samples.learner, samples.batch
    place, filled = episode_steps(b.over, count)
    steps = Batch(b.frame, b.next, b.actions, b.results, b.over, b.extras, {}, b.learner_reward)
    batch = tree_map(lambda x: x.flatten(0, 1)[place], steps)
    batch.memory = learner.memory(place.shape[1], place.device)
    batch.noise, batch.filled = b.noise, filled
    return Samples(learner, batch)


def in_slabs(net: Callable[[Any], tuple[Tensor, Any]], x: Any) -> tuple[Tensor, Any]:
    """What a net without memory gives of inputs [T, B, ...], at most so many frames at once."""
    steps, rows = tree_leaves(x)[0].shape[:2]
    each = max(1, SLAB // rows)
    return torch.cat([net(tree_map(lambda x, t=t: x[t : t + each], x))[0] for t in range(0, steps, each)]), {}
