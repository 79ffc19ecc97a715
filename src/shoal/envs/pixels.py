"""Pictures made smaller before anybody learns from them: grey, resized, and the last few stacked.

`Pixels` stands in the place of a `spaces.Observer` and does this to each of its images, which are [C, H, W]; vectors beside
them stay as they are. A stack begins with its first picture repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.envs.spaces import Observer
from shoal.spec import Shape, UserError

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # how bright red, green and blue look (ITU-R BT.601)


@dataclass(frozen=True)
class PixelConfig:
    grey: bool = False  # pictures without colours
    resize: int | None = None  # pixels that pictures are then high and wide; none: as they are
    stack: int = 1  # pictures seen at once: this one and those before it

    def __post_init__(self) -> None:
        if self.resize is not None and not 5 <= self.resize <= 4096:
            raise UserError(f"--env.resize is {self.resize}: it takes a number of pixels from 5 to 4096.")
        if not 1 <= self.stack <= 64:
            raise UserError(f"--env.stack is {self.stack}: it takes a number of pictures from 1 to 64.")


class Pixels:
    """An observer whose images come out smaller, and stacked; `past` holds what is stacked, by name."""

    plain = False

    def __init__(self, inner: Observer, config: PixelConfig):
        self.inner, self.config, self.images = inner, config, inner.images
        shape = inner.shape
        named = shape if isinstance(shape, dict) else {"": shape}
        self._raw = {k: np.zeros(s, inner.images if len(s) == 3 else np.float32) for k, s in named.items()}
        self.past: dict[str, np.ndarray] = {}
        out: dict[str, Shape] = {k: self._smaller(x).shape if x.ndim == 3 else x.shape for k, x in self._raw.items()}
        out = {k: (s[0] * config.stack, *s[1:]) if len(s) == 3 else s for k, s in out.items()}
        if not any(len(s) == 3 for s in out.values()):
            raise UserError("--env.grey, --env.resize and --env.stack are for pictures, and this environment shows none.")
        self.shape: Shape | dict[str, Shape] = out if isinstance(shape, dict) else out[""]

    def write(self, obs: Any, out: Any, first: bool = False) -> None:
        self.inner.write(obs, self._raw if isinstance(self.shape, dict) else self._raw[""])
        for name, raw in self._raw.items():
            place = out[name] if isinstance(self.shape, dict) else out
            if raw.ndim != 3:
                place[...] = raw
                continue
            new = self._smaller(raw)
            if first or name not in self.past:
                self.past[name] = np.concatenate([new] * self.config.stack)
            else:
                self.past[name] = np.concatenate((self.past[name][len(new) :], new))
            place[...] = self.past[name]

    def _smaller(self, x: np.ndarray) -> np.ndarray:
        """[C, H, W] -> [C', H', W']."""
        if self.config.grey and len(x) == 3:
            x = (
                np.tensordot(LUMA, x, 1)[None].round().astype(x.dtype)
                if x.dtype == np.uint8
                else np.tensordot(LUMA, x, 1)[None]
            )
        if self.config.resize is not None:
            from PIL import Image

            size = (self.config.resize, self.config.resize)
            x = np.stack([np.asarray(Image.fromarray(c).resize(size, Image.Resampling.BOX)) for c in x])
        return x


def picture_of(env: Any) -> np.ndarray | None:
    """What an environment of Gymnasium's or PettingZoo's kind draws, [H, W, 3] uint8; none where it does not."""
    try:
        picture = env.render()
    except NotImplementedError:
        return None
    picture = picture[-1] if isinstance(picture, list) and picture else picture
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
        return None
    return (
        picture if picture.dtype == np.uint8 else (picture * (255 if picture.max() <= 1 else 1)).clip(0, 255).astype(np.uint8)
    )


def observer(space: Any, config: PixelConfig, leave_out: str | None = None) -> Observer | Pixels:
    plain = Observer(space, leave_out)
    asked = config.grey or config.resize is not None or config.stack > 1
    return Pixels(plain, config) if asked else plain
