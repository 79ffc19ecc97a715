"""The nouns: spaces, groups and trees."""

from __future__ import annotations

import pytest
import torch

from shoal.spec import Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, View
from shoal.tree import tree_leaves, tree_map, where_rows

torch.set_num_threads(1)


def test_spaces() -> None:
    assert (Discrete(5).sizes, Discrete(5).shape, Discrete(5).kind) == ((5,), (), "discrete")
    assert (MultiDiscrete((3, 2)).sizes, MultiDiscrete((3, 2)).shape) == ((3, 2), (2,))
    assert (Box((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)).shape, Box((0.0,), (1.0,)).kind) == ((3,), "continuous")
    assert Discrete(5) == Discrete(5) != Discrete(4)


def test_groups_and_teams() -> None:
    groups = [Group(n, t, tuple(f"{n}_{i}" for i in range(k)), (2,), Discrete(2)) for n, t, k in
              (("a", "red", 1), ("b", "blue", 2), ("c", "red", 3))]  # fmt: skip
    spec = EnvSpec(tuple(groups))
    assert spec["b"] is groups[1]
    assert spec["c"].n == 3
    assert list(spec.teams) == ["red", "blue"]  # in the order they come
    assert spec.teams["red"] == (groups[0], groups[2])
    with pytest.raises(StopIteration):
        spec["d"]


def view(k: float) -> View:
    yes = torch.ones(2, 3, dtype=torch.bool)
    return View(torch.full((2, 3, 4), k), yes, yes, ~yes)


def test_tree_map_goes_everywhere_and_changes_nothing() -> None:
    tree = {"f": Frame({"g": view(1.0)}), "t": (torch.ones(2), [torch.zeros(1), None]), "n": None, "e": {}}
    out = tree_map(lambda x: x + 1 if x.is_floating_point() else x, tree)
    assert out["f"]["g"].obs.eq(2).all()
    assert tree["f"]["g"].obs.eq(1).all()  # type: ignore[index]
    assert isinstance(out["t"], tuple)
    assert isinstance(out["t"][1], list)
    assert out["t"][0].tolist() == [2.0, 2.0]
    assert out["t"][1][0].tolist() == [1.0]
    assert (out["t"][1][1], out["n"], out["e"], out["f"].state, out["f"]["g"].legal) == (None, None, {}, None, None)


def test_tree_map_over_several() -> None:
    a, b = {"p": Result(torch.ones(2), torch.zeros(2))}, {"p": Result(torch.full((2,), 5.0), torch.ones(2))}
    out = tree_map(lambda x, y: x + 10 * y, a, b)
    assert out["p"].reward.tolist() == [51.0, 51.0]
    assert out["p"].terminated.tolist() == [10.0, 10.0]
    assert out["p"].shaping is None
    assert tree_map(lambda x, y: x - y, (3, [1]), (1, [5])) == (2, [-4])


def test_tree_leaves_in_order() -> None:
    assert tree_leaves({"b": 1, "a": (2, [3, None]), "c": {}}) == [1, 2, 3]
    assert len(tree_leaves(Frame({"g": view(0.0)}, torch.zeros(2, 5)))) == 5
    assert tree_leaves(None) == []


def test_where_rows() -> None:
    a = {"x": torch.ones(2, 3, 4), "y": [torch.ones(2, 3)], "z": None, "long": torch.ones(2, 3, dtype=torch.long)}
    b = tree_map(torch.zeros_like, a)
    rows = torch.tensor([True, False])
    out = where_rows(rows, a, b)  # a whole row at a time
    assert out["x"].sum((1, 2)).tolist() == [12.0, 0.0]
    assert out["y"][0].tolist() == [[1.0] * 3, [0.0] * 3]
    assert out["z"] is None
    assert out["long"].dtype == torch.long
    each = torch.tensor([[True, False, False], [False, False, True]])
    out = where_rows(each, a, b)  # an agent at a time
    assert torch.equal(out["x"], each[..., None].expand(2, 3, 4).float())
    assert torch.equal(out["y"][0], each.float())


def test_where_rows_does_not_let_the_other_side_through() -> None:
    nan = torch.full((2, 3), torch.nan)
    assert where_rows(torch.tensor([True, False]), torch.ones(2, 3), nan)[0].tolist() == [1.0, 1.0, 1.0]
    assert where_rows(torch.tensor([False, True]), nan, torch.ones(2, 3))[0].tolist() == [1.0, 1.0, 1.0]
