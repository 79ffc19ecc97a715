"""Pictures made grey, smaller and stacked, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.envs.pixels import PixelConfig, Pixels, observer
from shoal.envs.spaces import Observer
from shoal.spec import UserError

spaces = pytest.importorskip("gymnasium.spaces")

RGB = spaces.Box(0, 255, (10, 10, 3), np.uint8)  # as most have it: channels last
FLOAT = spaces.Box(0, 1, (10, 10, 3), np.float32)


def blank(how: Observer | Pixels) -> Any:
    def array(shape: Any) -> np.ndarray:
        return np.full(shape, 77, how.images if len(shape) == 3 else np.float32)

    return {k: array(s) for k, s in how.shape.items()} if isinstance(how.shape, dict) else array(how.shape)


def seen(how: Observer | Pixels, obs: Any, **first: bool) -> Any:
    out = blank(how)
    how.write(obs, out, **first)
    return out


def flat(*color: float, dtype: Any = np.uint8) -> np.ndarray:
    return np.tile(np.array(color, dtype), (10, 10, 1))


def test_nothing_asked_for_is_the_plain_observer() -> None:
    assert type(observer(RGB, PixelConfig())) is Observer
    assert type(observer(spaces.Box(-1, 1, (3,)), PixelConfig())) is Observer


@pytest.mark.parametrize(
    ("space", "color", "grey"),
    [
        (RGB, (200, 100, 50), 124),  # 59.8 + 58.7 + 5.7 = 124.2
        (RGB, (10, 20, 29), 18),  # 2.99 + 11.74 + 3.306 = 18.036
        (RGB, (0, 1, 0), 1),  # 0.587, rounded and not cut
        (RGB, (255, 255, 255), 255),
        (FLOAT, (0.5, 0.25, 1.0), 0.41025),  # 0.1495 + 0.14675 + 0.114
    ],
)
def test_grey(space: Any, color: tuple[float, ...], grey: float) -> None:
    how = observer(space, PixelConfig(grey=True))
    assert how.shape == (1, 10, 10)
    out = seen(how, flat(*color, dtype=space.dtype))
    assert out.dtype == space.dtype
    assert np.unique(out).tolist() == pytest.approx([grey])


def test_what_has_no_three_colours_stays() -> None:
    how = observer(spaces.Box(0, 255, (10, 10), np.uint8), PixelConfig(grey=True))
    assert how.shape == (1, 10, 10)
    x = np.arange(100, dtype=np.uint8).reshape(10, 10)
    assert seen(how, x)[0].tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_resize_is_the_mean_of_what_a_pixel_covers(dtype: Any) -> None:
    how = observer(spaces.Box(0, 255, (10, 10, 3), dtype), PixelConfig(resize=5))
    assert how.shape == (3, 5, 5)
    x = np.zeros((10, 10, 3), dtype)
    x[0, 0], x[0, 1], x[1, 0], x[1, 1] = (4, 8, 200), (8, 8, 0), (0, 8, 0), (0, 8, 0)  # means 3, 8, 50
    x[8:, 6:8, 1] = [[1, 3], [5, 7]]  # last row of blocks, fourth column: 4, in the second channel
    out = seen(how, x)
    assert out.dtype == dtype
    assert out[:, 0, 0].tolist() == [3, 8, 50]
    assert out[:, 4, 3].tolist() == [0, 4, 0]
    assert int(out.sum()) == 3 + 8 + 50 + 4


def test_a_stack_is_oldest_first_and_begins_with_its_first_picture_repeated() -> None:
    how = observer(RGB, PixelConfig(grey=True, resize=5, stack=3))
    assert how.shape == (3, 5, 5)
    told = []
    for value, first in ((10, True), (20, False), (30, False), (40, False), (50, True), (60, False)):
        told.append(seen(how, flat(value, value, value), first=first)[:, 2, 2].tolist())
    assert told == [[10, 10, 10], [10, 10, 20], [10, 20, 30], [20, 30, 40], [50, 50, 50], [50, 50, 60]]


def test_a_stack_of_colours_keeps_each_picture_together() -> None:
    how = observer(RGB, PixelConfig(stack=2))
    assert how.shape == (6, 10, 10)
    seen(how, flat(1, 2, 3), first=True)
    assert seen(how, flat(4, 5, 6))[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_vectors_beside_pictures_stay_as_they_are() -> None:
    space = spaces.Dict({"eye": RGB, "speed": spaces.Box(-9, 9, (2,)), "back": RGB})
    how = observer(space, PixelConfig(grey=True, resize=5, stack=2))
    assert how.shape == {"vector": (2,), "eye": (2, 5, 5), "back": (2, 5, 5)}
    seen(how, {"eye": flat(9, 9, 9), "back": flat(0, 0, 0), "speed": np.array([1.0, 2.0])}, first=True)
    out = seen(how, {"eye": flat(7, 7, 7), "back": flat(5, 5, 5), "speed": np.array([-3.0, 4.0])})
    assert out["vector"].tolist() == [-3, 4]
    assert (out["eye"][:, 0, 0].tolist(), out["back"][:, 0, 0].tolist()) == ([9, 7], [0, 5])


@pytest.mark.parametrize("asked", [{"grey": True}, {"resize": 8}, {"stack": 2}])
def test_no_pictures_no_settings_for_them(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError) as e:
        observer(spaces.Box(-1, 1, (4,)), PixelConfig(**asked))
    assert str(e.value) == "--env.grey, --env.resize and --env.stack are for pictures, and this environment shows none."


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"resize": 4}, "--env.resize is 4: it takes a number of pixels from 5 to 4096."),
        ({"stack": 0}, "--env.stack is 0: it takes a number of pictures from 1 to 64."),
    ],
)
def test_settings_that_cannot_be(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as e:
        PixelConfig(**asked)
    assert str(e.value) == said
