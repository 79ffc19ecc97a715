"""Memory of nets (`--net.memory`) while they act and while they learn, and of exploration noise (`noise_keep`).

Memory is carried from step to step in the `memory` of `act`, zeroed where an agent starts and held where one does not act. A
net takes it as (input, state, start, active), see `Net` of `nets/heads.py`. Runs whose nets have none never come here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.ops.explore import correlated
from shoal.spec import Frame
from shoal.tree import cat_groups, tree_map

if TYPE_CHECKING:
    from shoal.algos.actorcritic import ActorCritic
    from shoal.algos.base import Algorithm
    from shoal.algos.onpolicy import Minibatch, OnPolicy
    from shoal.algos.samples import Samples
    from shoal.nets.heads import Net

Cat = Callable[[Callable[[str], Any]], Any]  # a learner's groups side by side

# --- acting ---


def remember_policy(
    learner: OnPolicy, frame: Frame, cat: Cat, before: Any, obs: Any, legal: Any, u: Tensor | None, explore: bool
) -> tuple[Any, Tensor | None, dict[str, Any]]:
    """The policy, the noise to draw from it with, and what is remembered: by nets, or of the noise."""
    active = _whose(learner, frame, cat)
    pi, _, state = learner.actor.unroll(obs, legal, before.get("actor"), None, active)
    after = {**before, "actor": state} if learner.recurrent else dict(before)
    if learner.recurrent and explore and learner.critic is not None:
        seen = learner.observations.critic_input(frame) if learner.observations.central else obs
        after["critic"] = learner.critic.value(seen, before["critic"], None, active)[1]
    if u is not None and learner.config.noise_keep:
        u, after["noise"] = correlated(u, before["noise"], cat(lambda g: frame[g].start), learner.config.noise_keep)
    return pi, u, after


def remember_output(
    learner: ActorCritic, actor: Net, frame: Frame, cat: Cat, before: Any, obs: Any, u: Tensor | None, explore: bool
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """As `remember_policy`, of an actor without a distribution (DDPG, TD3, SAC), whose critics take actions."""
    start, active, after = cat(lambda g: frame[g].start), _whose(learner, frame, cat), dict(before)
    params, state = actor(obs, before.get("actor"), None, active)
    if u is not None and explore and learner.config.noise_keep:
        u, after["noise"] = correlated(u, before["noise"], start, learner.config.noise_keep)
    if learner.recurrent:
        after["actor"] = state
        if explore:
            old = before["critic"]
            after["critic"] = {k: _critic_memory(learner, k, frame, x, start, active) for k, x in old.items()}
    return params, u, after


def _whose(learner: Algorithm, frame: Frame, cat: Cat) -> Tensor | None:
    """[..., N] whose memory goes on; none: everybody's."""
    return cat(lambda g: learner.remembers(frame[g])) if learner.recurrent and learner.has_inactive else None


def _critic_memory(learner: ActorCritic, k: str, frame: Frame, state: Any, start: Tensor, active: Tensor | None) -> Any:
    """A critic's memory after what is seen now. Where one critic serves all, every agent holds a copy; who starts has lost it
    already."""
    critic: Any = learner.critics[int(k)]
    seen = learner.observations.critic_input(frame)
    if not learner.as_one:
        return critic.features(seen, state, None, active)[1]
    who = start.long().argmin(-1)[..., None, None]
    kept = tree_map(lambda x: x.take_along_dim(who, -2).masked_fill(_begins(learner, frame)[..., None], 0), state)
    return tree_map(lambda x: x.expand(*x.shape[:-2], learner.n, -1).contiguous(), critic.features(seen, kept)[1])


def _begins(learner: Algorithm, frame: Frame) -> Tensor:
    """[..., 1] where time begins for all who are there, and so for one critic for all."""
    at = frame[learner.groups[0]].active.dim() - 1
    return cat_groups(learner.groups, lambda g: frame[g].start | ~frame[g].alive, at).all(-1, keepdim=True)


# --- learning ---


def unroll(samples: Samples, net: Callable[..., Any], x: Any, memory: Any, *when: Tensor | None) -> Any:
    """What a net gives of a sequence's inputs, and its memory after each step: those of the burn-in come first, and no gradient
    goes back to them."""
    if k := samples.learner.burn_in:
        with torch.no_grad():
            warm, *then = tree_map(lambda t: t[:k], (x, *when))
            memory = tree_map(lambda t: t[-1], net(warm, memory, *then)[1])
        x, *when = tree_map(lambda t: t[k:], (x, *when))
    return net(x, memory, *when)


def add_memory(learner: OnPolicy, batch: Minibatch, samples: Samples, after: Any) -> None:
    """The memory of all nets before each step of a rollout; `after`: that of the values' net after it."""
    batch.start, batch.remembers, first = samples.start, samples.remembers, samples.memory
    states = {"actor" if learner.critic is None else "critic": after}
    if learner.critic is not None:
        when = batch.start, batch.remembers
        states["actor"] = learner.actor.unroll(batch.actor_input, batch.legal, first["actor"], *when)[2]
    batch.memory = {k: tree_map(lambda a, b: torch.cat((a[None], b[:-1])), first[k], x) for k, x in states.items()}


def unroll_critic(learner: ActorCritic, critic: Any, k: int, samples: Samples, following: bool) -> Tensor:
    """What the `k`-th critic makes of what it sees, in these frames or in the next."""
    memory = samples.memory["critic"][str(k)]
    when: Any = ()
    then: Any = ()
    if learner.as_one:  # memory of one critic for all begins when time begins for all
        memory = tree_map(lambda x: x[..., :1, :], memory)
        when, then = (_begins(learner, samples.batch.frame), None), (_begins(learner, samples.next_frame), None)
    out, after = samples.unroll(critic.features, samples.critic_input, memory, *when)
    return samples.after(critic.features, samples.next_critic_input, after, *then)[0] if following else out
