"""Rollout storage: what is not written is NaN, what is written keeps its place."""

from __future__ import annotations

from typing import Any

import torch

from shoal.buffers.rollout import RolloutBuffer
from shoal.spec import Frame, Pay, View, tree_leaves

torch.set_num_threads(1)


def record(k: float) -> Any:
    yes = torch.ones(2, 3, dtype=torch.bool)
    view = View(torch.full((2, 3, 4), k), yes, yes, ~yes)
    pay = Pay(torch.full((2, 3), k, dtype=torch.float64), yes)
    return (Frame({"a": view}), {"a": torch.full((2, 3), int(k))}, {"a": pay}, {"a": {}})


def test_shapes_types_and_what_there_is_not() -> None:
    buffer = RolloutBuffer(5)
    buffer.put(0, record(1.0))
    frame, actions, pays, extras = buffer.data
    assert frame["a"].obs.shape == (5, 2, 3, 4)
    assert frame["a"].alive.dtype == torch.bool
    assert actions["a"].dtype == torch.long
    assert pays["a"].reward.dtype == torch.float64
    assert frame["a"].legal is None
    assert frame.state is None
    assert pays["a"].shaping is None
    assert extras == {"a": {}}


def test_unwritten_floats_are_nan() -> None:
    buffer = RolloutBuffer(4)
    buffer.put(2, record(7.0))
    obs = buffer.data[0]["a"].obs
    assert [x.isnan().all().item() for x in obs] == [True, True, False, True]
    assert (obs[2] == 7).all()
    assert buffer.data[2]["a"].reward[[0, 1, 3]].isnan().all()
    assert buffer.data[1]["a"][[0, 1, 3]].abs().sum() == 0
    assert not buffer.data[0]["a"].alive[[0, 1, 3]].any()


def test_each_step_in_its_place_and_addresses_kept() -> None:
    buffer = RolloutBuffer(3)
    buffer.put(0, record(0.0))
    addresses = [x.data_ptr() for x in tree_leaves(buffer.data)]
    for k in range(3):
        buffer.put(k, record(float(k + 10)))
    assert [x.data_ptr() for x in tree_leaves(buffer.data)] == addresses
    assert buffer.data[0]["a"].obs[:, 0, 0, 0].tolist() == [10.0, 11.0, 12.0]
    buffer.put(1, record(99.0))
    assert buffer.data[0]["a"].obs[:, 1, 2, 3].tolist() == [10.0, 99.0, 12.0]
    assert buffer.data[1]["a"][:, 0, 0].tolist() == [10, 99, 12]


def test_it_copies() -> None:
    buffer, mine = RolloutBuffer(2), record(1.0)
    buffer.put(0, mine)
    mine[0]["a"].obs.fill_(5.0)
    assert (buffer.data[0]["a"].obs[0] == 1).all()
