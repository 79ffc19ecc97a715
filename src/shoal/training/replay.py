"""Making the replay of a loop, and a trainer for each who learns from it; ending sequences where worlds begin anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm, Replay
from shoal.buffers.capacity import size
from shoal.buffers.episodes import Episodes
from shoal.buffers.replay import ReplayBuffer
from shoal.spec import EnvSpec, Frame, UserError
from shoal.training.collect import Collector
from shoal.training.offpolicy import OffPolicyTrainer, Update
from shoal.tree import tree_leaves


def make_trainers(
    algorithms: list[Algorithm], collector: Collector, rollout: int, update: Update, uniform: Callable[[int], Tensor]
) -> tuple[ReplayBuffer | None, list[OffPolicyTrainer]]:
    """The replay, and a trainer for each who learns from it; none where nobody does."""
    learners = [a for a in algorithms if isinstance(a.feed, Replay)]
    if not learners:
        return None, []
    env = collector.env
    replay = make_replay(learners, env.spec, collector.frame, rollout, env.rows, collector.memory)
    replay.allocate()
    collector.remembers = bool(tree_leaves(memory_to_store(learners, collector.memory)))
    return replay, [OffPolicyTrainer(a, replay, update, uniform) for a in learners]


def make_replay(learners: list[Algorithm], spec: EnvSpec, frame: Frame, rollout: int, rows: int, memory: Any) -> ReplayBuffer:
    """One for all who learn from the past, not yet allocated. `frame` and `memory` are what there is now."""
    feeds = [a.feed for a in learners if isinstance(a.feed, Replay)]
    if len(wanted := {f.capacity for f in feeds}) > 1:
        given = " and ".join(f"{x:,}" for x in sorted(wanted))
        raise UserError(f"the groups want replays of {given} steps: give them one --algo.capacity.")
    capacity = feeds[0].capacity
    longest = max(f.length + rollout - (not f.whole) for f in feeds)  # so that a rollout never writes over what it makes whole
    if capacity < longest * rows:
        raise UserError(
            f"a replay of {capacity:,} steps is too small for {rows} rows and {longest} steps at a time: --algo.capacity must "
            f"be {longest * rows:,} at least (COMA's --algo.replay counts episodes)."
        )
    device = frame[spec.groups[0].name].active.device

    def blank(g: str, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros(1, spec[g].n, *shape, dtype=dtype, device=device)

    names = [g.name for g in spec.groups]
    actions = {
        g: blank(g, torch.float if spec[g].action.kind == "continuous" else torch.long, spec[g].action.shape) for g in names
    }
    learner_reward, ended = ({g: blank(g, d) for g in names} for d in (torch.float, torch.bool))
    transition = (frame, frame, actions, learner_reward, ended, torch.zeros(1, dtype=torch.bool, device=device))
    return ReplayBuffer(transition, memory_to_store(learners, memory), capacity // rows, rows, device)


def memory_to_store(learners: list[Algorithm], memory: Any) -> dict[str, Any]:
    """The memory of those who learn from a replay, and of those whom they ask."""
    return {g: memory[g] for a in learners if isinstance(a.feed, Replay) for g in (memory if a.needs_peers else a.groups)}


def break_off(replay: ReplayBuffer, trainers: list[OffPolicyTrainer], rows: Tensor) -> None:
    """The episodes under way in these rows [B] will not go on: what was written last is their last step."""
    over = replay.transitions.leaves[-1]
    last = replay.slots(replay.count - 1)
    replay.transitions.store[over.dtype][last, :, over.start] |= rows
    for trainer in trainers:
        if isinstance(trainer.sampler, Episodes):
            trainer.sampler.clock.masked_fill_(rows, 0)


def cost(replay: ReplayBuffer) -> str:
    """What it takes, in a sentence."""
    return f"The replay holds {replay.steps * replay.rows:,} steps in {size(replay.bytes)} on {replay.device}."
