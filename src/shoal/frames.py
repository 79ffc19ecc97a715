"""What passes between rooms: what agents see (frames), what a step brought (outcomes), and many steps at once (batches).

Letters in shape comments as in `spec.py`: `T` time, `B` rows, `N` agents of a group, `O` observation, `A` choices, `D` action
dimensions, `S` state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class View:
    """What one group sees. Leading dimensions are [B] in a frame and [T, B] in a batch."""

    obs: Tensor | dict[str, Tensor]  # [B, N, *O] of any dtype
    alive: Tensor  # [B, N]
    active: Tensor  # [B, N] alive and to move now; equals `alive` unless turn-based
    start: Tensor  # [B, N] an agent's first frame: new episode or late arrival
    legal: Tensor | None = None  # [B, N, A] the choices of all discrete dimensions end to end; never all false


@dataclass
class Frame:
    views: dict[str, View]
    state: Tensor | None = None  # [B, S] the world's own; none where the joined observations are the state

    def __getitem__(self, group: str) -> View:
        return self.views[group]


@dataclass
class Result:
    """What one group earned in a step."""

    reward: Tensor  # [B, N] reported
    terminated: Tensor  # [B, N]
    shaping: Tensor | None = None  # [B, N] paid, never reported


Pay = Result  # its name in worlds that were written before 0.1


@dataclass
class Outcome:
    results: dict[str, Result]
    over: Tensor  # [B] the row's episode ended
    stats: dict[str, Tensor]  # each [B]
    next: Frame  # the true next frame
    frame: Frame  # the one to act on: `next` with the rows that are over begun again
    lost: Tensor | None = None  # [B] rows that an accident cut off: nobody counts their episode; none: there are none


@dataclass
class Batch:
    """All groups at the same moments. A plain transition has T = 1."""

    frame: Frame  # [T, B, ...]
    next: Frame  # [T, B, ...] the true next frames
    actions: dict[str, Tensor]  # [T, B, N] or [T, B, N, D]
    results: dict[str, Result]  # [T, B, N] raw
    over: Tensor  # [T, B]
    extras: dict[str, dict[str, Tensor]]  # what `act` left beside each action: [T, B, N, ...]
    memory: dict[str, Any]  # the memory before the first step: trees of [B, N, ...]
    learner_reward: dict[str, Tensor] = field(default_factory=dict)  # [T, B, N] what is learnt from: with shaping and bonus
    noise: Tensor | None = None  # uniform numbers for the update's own draws
    memories: dict[str, Any] | None = None  # the memory before each step, [T, B, N, ...], where somebody asked for it
    weight: Tensor | None = None  # [B] importance of each sequence, where they were not drawn evenly
    filled: Tensor | None = None  # [T, B] what belongs to the sequences; none: all of it
    stats: dict[str, Tensor] = field(default_factory=dict)  # [T, B] of the worlds, for the log
    lost: Tensor | None = None  # [T, B] rows that an accident cut off, see `Outcome`
