"""Rollout storage: every step in its place, constants not copied, addresses kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.buffers.rollout import RolloutBuffer
from shoal.spec import Frame, Result, UserError, View

torch.set_num_threads(1)
YES = torch.ones(2, 3, dtype=torch.bool)


def record(k: float) -> Any:
    view = View(torch.full((2, 3, 4), k), YES, YES, ~YES)
    pay = Result(torch.full((2, 3), k, dtype=torch.float64), YES)
    return (Frame({"a": view}), {"a": torch.full((2, 3), int(k))}, {"a": pay}, {"a": {}})


def filled(buffer: RolloutBuffer, *ks: float) -> Any:
    for k in ks:
        buffer.put(record(k))
    return buffer.take()


def test_shapes_types_and_what_there_is_not() -> None:
    frame, actions, results, extras = filled(RolloutBuffer(), 1, 2, 3, 4, 5)
    assert frame["a"].obs.shape == (5, 2, 3, 4)
    assert frame["a"].alive.shape == (5, 2, 3)
    assert frame["a"].alive.dtype == torch.bool
    assert actions["a"].dtype == torch.long
    assert results["a"].reward.dtype == torch.float64
    assert frame["a"].legal is None
    assert frame.state is None
    assert results["a"].shaping is None
    assert extras == {"a": {}}


def test_each_step_in_its_place_and_addresses_kept() -> None:
    buffer = RolloutBuffer()
    first = filled(buffer, 10, 11, 12)
    assert first[0]["a"].obs[:, 1, 2, 3].tolist() == [10.0, 11.0, 12.0]
    address = first[0]["a"].obs.data_ptr()
    second = filled(buffer, 20, 99, 22)
    assert second[0]["a"].obs.data_ptr() == address
    assert second[0]["a"].obs[:, 0, 0, 0].tolist() == [20.0, 99.0, 22.0]
    assert second[1]["a"][:, 0, 0].tolist() == [20, 99, 22]
    assert second[2]["a"].reward[:, 1, 1].tolist() == [20.0, 99.0, 22.0]
    assert not second[0]["a"].start.any()


def test_a_rollout_of_another_length() -> None:
    buffer = RolloutBuffer()
    filled(buffer, 1, 2, 3)
    assert filled(buffer, 7, 8)[0]["a"].obs[:, 0, 0, 0].tolist() == [7.0, 8.0]
    assert filled(buffer, 4)[0]["a"].obs.shape == (1, 2, 3, 4)


def test_what_is_one_object_in_all_records_is_widened_not_copied() -> None:
    frame = filled(RolloutBuffer(), 1, 2, 3)[0]
    assert frame["a"].alive.data_ptr() == YES.data_ptr()
    assert frame["a"].start.data_ptr() != YES.data_ptr()


def test_a_constant_that_stops_being_one_is_copied() -> None:
    buffer, here = RolloutBuffer(), torch.zeros(2)
    for x in (here, here, torch.ones(2)):
        buffer.put({"x": x})
    assert buffer.take()["x"][:, 0].tolist() == [0.0, 0.0, 1.0]


def test_a_tensor_that_is_used_again_is_refused() -> None:
    buffer, mine = RolloutBuffer(), torch.zeros(2)
    for k in range(3):
        buffer.put({"x": mine.fill_(k)})
    with pytest.raises(UserError, match="it must return new ones each step"):
        buffer.take()


def test_a_tensor_that_was_written_to_may_stand_before_a_constant() -> None:
    """A frame that a captured graph carries over is written to, and is in the first record alone: what follows may repeat."""
    buffer, here = RolloutBuffer(), torch.zeros(2)
    carried = torch.zeros(2).fill_(7)
    assert carried._version > 0
    for x in (carried, here, here):
        buffer.put({"x": x})
    assert buffer.take()["x"][:, 0].tolist() == [7.0, 0.0, 0.0]


def test_a_tensor_that_is_used_again_is_refused_among_others() -> None:
    """Wherever it stands, and though others are new, or are constants that nobody wrote to."""
    for pattern in ("abb", "bab", "bba", "ccbb", "bcbc", "cbcb"):
        buffer, tensors = RolloutBuffer(), {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.ones(2)}
        tensors["b"].fill_(1)
        for name in pattern:
            buffer.put({"x": tensors[name]})
        with pytest.raises(UserError, match="it must return new ones each step"):
            buffer.take()


def test_one_record_is_a_copy_of_its_own() -> None:
    """A rollout of one step: what the next take writes must not be in the world's own tensors."""
    buffer = RolloutBuffer()
    mine = torch.zeros(2)
    buffer.put({"x": mine})
    first = buffer.take()["x"]
    buffer.put({"x": torch.ones(2)})
    buffer.take()
    assert mine.tolist() == [0.0, 0.0]
    assert first.shape == (1, 2)
