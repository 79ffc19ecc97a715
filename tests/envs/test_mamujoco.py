"""Bodies whose joints are shared out; with the library alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.envs.mamujoco import MaMuJoCo, claims
from shoal.envs.rows import RowRunner, arrays
from shoal.ids import find
from shoal.spec import Box, UserError


def config(id: str, **settings: Any) -> MaMuJoCo.Config:
    return MaMuJoCo.Config(workers=0, id=id, **settings)


def test_bodies_by_name() -> None:
    with pytest.raises(UserError, match=r"no body 'Antt' \(did you mean 'Ant'"):
        MaMuJoCo.row(config("Antt-4x2"))
    with pytest.raises(UserError, match="no body ''; it has Ant, HalfCheetah"):
        MaMuJoCo.row(config(""))
    with pytest.raises(UserError, match="move at once"):
        MaMuJoCo.row(config("Ant-4x2", turns=True))


def test_what_it_claims() -> None:
    assert all(map(claims, ["Ant-4x2", "Humanoid-9|8", "CoupledHalfCheetah-1p1"]))
    assert not any(map(claims, ["Ant-v5", "Ant", "CartPole-v1", "Antt-4x2"]))
    assert find("envs", "mamujoco/Ant-4x2").settings == {"id": "Ant-4x2"}


def test_the_ant() -> None:
    pytest.importorskip("gymnasium_robotics")
    row = MaMuJoCo.row(config("Ant-4x2"))
    (group,) = row.spec.groups
    assert (group.name, group.team, group.n, group.obs) == ("agents", "agents", 4, (42,))
    assert group.action == Box((-1.0, -1.0), (1.0, 1.0))
    assert not group.mortal
    assert row.spec.common
    assert row.spec.state == 105
    assert row.spec.horizon == 1000
    whole = arrays(row, 1)
    runner = RowRunner([row], [0], whole)
    seen = []
    for _ in range(2):  # a seed repeats
        runner.reset([0])
        whole["action", "agents"][:] = 0.25
        for _ in range(5):
            runner.step(0, 1)
        seen.append([runner.now[0].obs["agents"].copy(), runner.now[0].reward["agents"].copy()])
    for a, b in zip(*seen, strict=True):
        assert a.tolist() == b.tolist()
    assert len(set(runner.now[0].reward["agents"].tolist())) == 1
    assert np.isfinite(seen[0][0]).all()


def test_unequal_parts_are_groups_of_one_team() -> None:
    pytest.importorskip("gymnasium_robotics")
    spec = MaMuJoCo.row(config("Hopper-3x1")).spec
    assert [(g.name, g.team, g.agents, g.obs) for g in spec.groups] == [
        ("agent_0", "team", ("agent_0", "agent_2"), (8,)),
        ("agent_1", "team", ("agent_1",), (9,)),
    ]


def test_divisions_that_cannot_be() -> None:
    pytest.importorskip("gymnasium_robotics")
    with pytest.raises(UserError, match="cannot divide Ant as '3x3': it takes 2x4, 2x4d or 4x2"):
        MaMuJoCo.row(config("Ant-3x3"))
    with pytest.raises(UserError, match=r"'agent_obks', which .* does not know"):
        MaMuJoCo.row(config("Ant-4x2", args="agent_obks=3"))
