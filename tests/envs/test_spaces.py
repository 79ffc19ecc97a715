"""Gymnasium's spaces as Shoal's, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.envs.spaces import Moves, Observer
from shoal.spec import Box, Discrete, MultiDiscrete, UserError

spaces = pytest.importorskip("gymnasium.spaces")


def box(*shape: int, low: Any = -1.0, high: Any = 1.0, dtype: Any = np.float32) -> Any:
    return spaces.Box(low, high, shape, dtype)


def pixels(*shape: int) -> Any:
    return box(*shape, low=0, high=255, dtype=np.uint8)


def written(space: Any, obs: Any, images: Any = None) -> Any:
    """What an observer writes, into arrays that held something else."""
    how = Observer(space)

    def array(shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, 77, (images or how.images) if len(shape) == 3 else np.float32)

    out = {k: array(s) for k, s in how.shape.items()} if isinstance(how.shape, dict) else array(how.shape)
    how.write(obs, out)
    return {k: v.tolist() for k, v in out.items()} if isinstance(out, dict) else out.tolist()


@pytest.mark.parametrize(
    ("space", "obs", "expected"),
    [
        (box(3), np.array([0.5, -1, 0.25], np.float32), [0.5, -1, 0.25]),
        (box(2, 2), np.array([[1, 2], [3, 4]], np.float64), [1, 2, 3, 4]),
        (box(), 0.5, [0.5]),
        (box(6, 7), np.ones((6, 7), np.float32), [1] * 42),  # a table of floats is no image
        (pixels(3), np.array([0, 7, 255], np.uint8), [0, 7, 255]),
        (spaces.Discrete(4), 2, [0, 0, 1, 0]),
        (spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
        (spaces.MultiDiscrete([[2, 3], [2, 2]]), np.array([[0, 1], [1, 0]]), [1, 0, 0, 1, 0, 0, 1, 1, 0]),
        (spaces.MultiDiscrete([2, 3], start=[5, 1]), np.array([6, 1]), [0, 1, 1, 0, 0]),
        (spaces.MultiBinary((2, 2)), np.array([[1, 0], [1, 1]], np.int8), [1, 0, 1, 1]),
        (box(3, 3, 2, dtype=np.int8), np.arange(18, dtype=np.int8).reshape(3, 3, 2), list(range(18))),  # a board
        (box(2, 1, 2, 2), np.arange(8).reshape(2, 1, 2, 2), list(range(8))),
        (spaces.Dict(b=spaces.Discrete(2), a=box(2)), {"a": [0.5, 1], "b": 1}, None),
        (spaces.Tuple((spaces.Discrete(2), box(1), spaces.Tuple((box(1),)))), (0, [3], ([4],)), [1, 0, 3, 4]),
    ],
    ids=str,
)
def test_vectors(space: Any, obs: Any, expected: list[float] | None) -> None:
    if expected is None:  # in whichever order the space has its keys
        expected = {"a": [0.5, 1, 0, 1], "b": [0, 1, 0.5, 1]}[next(iter(space.spaces))]
    assert Observer(space).shape == (len(expected),)
    assert written(space, obs) == expected


@pytest.mark.parametrize(
    ("shape", "expected", "last"),
    [
        ((210, 160, 3), (3, 210, 160), True),
        ((3, 210, 160), (3, 210, 160), False),
        ((84, 84, 4), (4, 84, 84), True),
        ((4, 84, 84), (4, 84, 84), False),
        ((8, 8, 111), (111, 8, 8), True),  # chess: the channels are many
        ((20, 9, 9), (20, 9, 9), False),
        ((9, 9, 9), (9, 9, 9), True),
        ((40, 30, 12), (12, 40, 30), True),
        ((12, 40, 30), (12, 40, 30), False),
        ((6, 5), (1, 6, 5), False),
    ],
)
def test_channels_come_first(shape: tuple[int, ...], expected: tuple[int, ...], last: bool) -> None:
    space = pixels(*shape)
    assert Observer(space).shape == expected
    image = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    assert written(space, image) == (np.moveaxis(image, -1, 0) if last else image.reshape(expected)).tolist()


def test_an_images_numbers_keep_their_type() -> None:
    assert Observer(pixels(5, 5, 3)).images is np.uint8
    assert Observer(box(5, 5, 3)).images is np.float32
    assert Observer(box(6, 7, 2, dtype=np.int8)).images is np.float32
    both = spaces.Dict(depth=box(5, 5, 1), rgb=pixels(5, 5, 3))
    assert Observer(both).images is np.float32
    seen = written(both, {"depth": np.full((5, 5, 1), 0.5, np.float32), "rgb": np.full((5, 5, 3), 51, np.uint8)})
    assert seen["depth"][0][0][0] == 0.5
    assert seen["rgb"][2][4][4] == pytest.approx(0.2)


def test_images_beside_vectors_are_parts() -> None:
    space = spaces.Dict(
        camera=pixels(64, 64, 3),
        speed=box(2),
        gear=spaces.Discrete(3),
        arm=spaces.Dict({"top.view": pixels(8, 9, 1), "angle": box(1)}),
    )
    how = Observer(space)
    assert how.shape == {"vector": (6,), "camera": (3, 64, 64), "arm/top_view": (1, 8, 9)}
    obs = {
        "camera": np.full((64, 64, 3), 9, np.uint8),
        "speed": np.array([0.5, -0.5]),
        "gear": 1,
        "arm": {"top.view": np.full((8, 9, 1), 4, np.uint8), "angle": np.array([0.25])},
    }
    seen = written(space, obs)
    numbers = {"speed": [0.5, -0.5], "gear": [0, 1, 0], "arm": [0.25]}
    assert seen["vector"] == [x for k in space.spaces for x in numbers.get(k, [])]
    assert np.unique(seen["camera"]).tolist() == [9]
    assert np.unique(seen["arm/top_view"]).tolist() == [4]


def test_one_image_alone_needs_no_name() -> None:
    assert Observer(spaces.Tuple((pixels(8, 8, 3),))).shape == (3, 8, 8)
    assert Observer(spaces.Tuple((pixels(8, 8, 3), pixels(9, 9, 3)))).shape == {"0": (3, 8, 8), "1": (3, 9, 9)}
    assert Observer(spaces.Dict(vector=pixels(8, 8, 3), x=box(1))).shape == {"vector": (1,), "vector/image": (3, 8, 8)}


def test_a_key_is_left_out() -> None:
    space = spaces.Dict(action_mask=box(3), observation=box(2))
    how, out = Observer(space, leave_out="action_mask"), np.zeros(2, np.float32)
    assert how.shape == (2,)
    how.write({"observation": np.array([3, 4]), "action_mask": np.ones(3)}, out)
    assert out.tolist() == [3, 4]


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(a=spaces.Text(5))], ids=str)
def test_what_has_no_counterpart(space: Any) -> None:
    with pytest.raises(UserError, match=r"are a (Text|Sequence) space"):
        Observer(space)
    with pytest.raises(UserError, match=r"are a (Text|Sequence) space"):
        Moves(space)


@pytest.mark.parametrize(
    ("space", "ours", "action", "expected"),
    [
        (spaces.Discrete(4), Discrete(4), 3, 3),
        (spaces.Discrete(4, start=-2), Discrete(4), 1, -1),
        (spaces.MultiDiscrete([2, 3]), MultiDiscrete((2, 3)), [1, 2], [1, 2]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete((2, 3, 4, 5)), [1, 2, 3, 4], [[1, 2], [3, 4]]),
        (spaces.MultiDiscrete([2, 3], start=[1, -1]), MultiDiscrete((2, 3)), [0, 0], [1, -1]),
        (spaces.MultiBinary(3), MultiDiscrete((2, 2, 2)), [1, 0, 1], [1, 0, 1]),
        (spaces.Dict(a=spaces.Discrete(2, start=5), b=spaces.MultiDiscrete([3, 3])), MultiDiscrete((2, 3, 3)), [1, 2, 0], None),
    ],
    ids=str,
)
def test_choices(space: Any, ours: Any, action: Any, expected: Any) -> None:
    moves = Moves(space)
    assert moves.space == ours
    assert moves.note is None
    read = moves.read(np.array(action))
    assert space.contains(read)
    if expected is None:
        assert (read["a"], read["b"].tolist()) == (6, [2, 0])
    else:
        assert np.asarray(read).tolist() == expected


def test_boxes() -> None:
    space = box(2, 2, low=-2.0, high=3.0, dtype=np.float64)
    moves = Moves(space)
    assert moves.space == Box((-2.0,) * 4, (3.0,) * 4)
    read = moves.read(np.array([0.5, 1, 1.5, 2], np.float32))
    assert read.dtype == np.float64
    assert read.tolist() == [[0.5, 1], [1.5, 2]]
    assert space.contains(read)
    both = spaces.Tuple((box(2), spaces.Tuple((box(1, high=4.0),))))
    assert Moves(both).space == Box((-1.0,) * 3, (1.0, 1.0, 4.0))
    first, (second,) = Moves(both).read(np.array([0.5, 1, 3], np.float32))
    assert first.tolist() == [0.5, 1]
    assert second.tolist() == [3]


def test_a_bound_is_not_passed_by_rounding() -> None:
    space = box(1, low=-0.1, high=0.1, dtype=np.float64)
    edge = np.array([0.1], np.float32)
    assert float(edge[0]) > 0.1
    assert space.contains(Moves(space).read(edge))


def test_whole_numbers_in_a_box_are_rounded() -> None:
    space = box(2, low=0, high=9, dtype=np.int32)
    read = Moves(space).read(np.array([2.6, 3.4], np.float32))
    assert read.tolist() == [3, 3]
    assert space.contains(read)


def test_numbers_without_bounds() -> None:
    huge = float(np.finfo(np.float32).max)
    space = spaces.Box(np.array([-np.inf, 0, -np.inf, -1, -huge]), np.array([np.inf, np.inf, 5, 1, huge]), dtype=np.float64)
    moves = Moves(space)
    assert moves.space == Box((-1.0, 0.0, 3.0, -1.0, -1.0), (1.0, 2.0, 5.0, 1.0, 1.0))
    assert moves.note == "4 of 5 action dimensions have no bounds of their own and are taken as [-1, 1]."
    assert Moves(box(2)).note is None


def test_choices_beside_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="choices and numbers at once"):
        Moves(spaces.Dict(a=spaces.Discrete(2), b=box(1)))
    with pytest.raises(UserError, match="empty action space"):
        Moves(spaces.Dict())
