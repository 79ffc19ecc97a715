"""A critic that is trained in slices of time (`--algo.critic-slices`), before the actor: the last slice first. They are slices
of the rollout, or with `--algo.advantage-every minibatch` of every minibatch, before the actor's step on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.buffers.minibatches import spans
from shoal.ops import losses
from shoal.tree import tree_map

if TYPE_CHECKING:
    from shoal.algos.onpolicy import Metrics, Minibatch, OnPolicy


def update_critic_in_slices(learner: OnPolicy, batch: Minibatch, fresh: bool = True) -> Metrics:
    """One step of the critic for each slice, towards targets that stay; no step is left out. A `fresh` advantage is the target
    less the value predicted just before the slice's own step. The batch has the memory before each step."""
    learner.train_mode(True)
    done = []
    for a, b in reversed(spans(len(batch.value), learner.slices)):
        part: Minibatch = tree_map(lambda x: x[a:b], batch)  # noqa: B023
        done.append(learner.update_critic(part.with_first_memory(), learner.learning))
    metrics, predicted, counts = zip(*done, strict=True)
    if fresh:
        value = learner.denormalised(torch.cat(predicted[::-1]))
        batch.advantage = learner.normalised(learner.denormalised(batch.target) - value, batch.active)
    return losses.weighted_means(list(metrics), list(counts))
