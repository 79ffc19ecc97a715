"""How an environment's own loop speaks, as data that a run saves: a policy acts by it without the environment or its library.

A `Conversion` is what one agent sees and does in that loop. Spaces are Gymnasium's, written down by `describe` and made again
by `restored`, which needs no Gymnasium: `spaces.py` knows a space by its name and its attributes.

    observation   what the agent is given; `direct`: arrays as the nets take them, as native worlds have them
    action        what the environment wants
    mask          where legal choices are: "observation" or "info" (their `action_mask`), or none
    pixels        how pictures are made smaller, and stacked; none: as they are
    hold          frames that an action is held for
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from shoal.envs.pixels import PixelConfig, Pixels, observer
from shoal.envs.spaces import SIMPLE, Moves, Observer, kind_of
from shoal.spec import Box, Discrete, EnvSpec, Group, Shape, UserError

MASK = "action_mask"
Description = dict[str, Any]  # of a space, for JSON


@dataclass(frozen=True)
class Conversion:
    observation: Description
    action: Description
    mask: Literal["observation", "info"] | None = None
    direct: bool = False
    pixels: dict[str, Any] | None = None
    hold: int = 1

    def observer(self, group: Group) -> Direct | Observer | Pixels:
        if self.direct:
            return Direct(group.obs)
        pixels = PixelConfig(**self.pixels) if self.pixels else PixelConfig()
        return observer(restored(self.observation), pixels, MASK if self.mask == "observation" else None)

    def moves(self) -> Moves:
        return Moves(restored(self.action))


def conversion(observation: Any, action: Any, mask: Any = None, pixels: PixelConfig | None = None, hold: int = 1) -> Conversion:
    """Of spaces as Gymnasium has them."""
    asked = None if pixels is None else PixelConfig(pixels.grey, pixels.resize, pixels.stack)
    shrunk = None if asked in (None, PixelConfig()) else asdict(asked)
    return Conversion(describe(observation, bounds=False), describe(action), mask, pixels=shrunk, hold=hold)


def direct(spec: EnvSpec) -> dict[str, Conversion]:
    """Of a world that speaks as its spec does: agent -> how."""

    def box(shape: Shape) -> Description:
        return {"type": "Box", "shape": list(shape), "dtype": "float32"}

    out = {}
    for g in spec.groups:
        seen = {"type": "Dict", "spaces": [[k, box(s)] for k, s in g.obs.items()]} if isinstance(g.obs, dict) else box(g.obs)
        action: Description
        if isinstance(g.action, Box):
            action = {**box(g.action.shape), "low": list(g.action.low), "high": list(g.action.high)}
        elif isinstance(g.action, Discrete):
            action = {"type": "Discrete", "n": g.action.n, "start": 0, "dtype": "int64"}
        else:
            action = {
                "type": "MultiDiscrete",
                "nvec": list(g.action.sizes),
                "start": [0] * len(g.action.sizes),
                "dtype": "int64",
            }
        out.update(dict.fromkeys(g.agents, Conversion(seen, action, direct=True)))
    return out


class Direct:
    """An observer of arrays that are already as the nets take them."""

    images = None  # of any dtype
    plain = True

    def __init__(self, shape: Shape | dict[str, Shape]):
        self.shape = shape

    def write(self, obs: Any, out: Any, first: bool = False) -> None:
        for place, x in ((out[k], obs[k]) for k in out) if isinstance(out, dict) else ((out, obs),):
            place[...] = x


# --- spaces as data --------------------------------------------------------------------------------------------------


def describe(space: Any, bounds: bool = True) -> Description:
    """A space for JSON. `bounds` of a Box are for actions: no observation is clipped."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        inner = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
        return {"type": kind, "spaces": [[key, describe(x, bounds)] for key, x in inner]}
    out: Description = {"type": kind, "dtype": str(np.dtype(space.dtype))}
    if kind == "Discrete":
        return {**out, "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiDiscrete":
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return {**out, "nvec": np.asarray(space.nvec).tolist(), "start": np.asarray(start).tolist()}
    out["shape"] = list(space.shape)
    if kind == "Box" and bounds:
        out.update({side: _sparse(getattr(space, side)) for side in ("low", "high")})
    return out


def _sparse(bound: np.ndarray) -> Any:
    """One number where all are alike; none where there is no bound, for JSON has no infinity."""
    flat = [float(x) if np.isfinite(x) else None for x in np.ravel(bound)]
    return flat[0] if flat and len(set(flat)) == 1 else flat


def restored(data: Description) -> Any:
    """What was described, as an object with the space's name and attributes."""
    kind = data["type"]
    if kind in ("Dict", "Tuple"):
        inner = {key: restored(x) for key, x in data["spaces"]}
        return _named(kind, spaces=inner if kind == "Dict" else tuple(inner.values()))
    if kind not in SIMPLE:
        raise UserError(f"there is no space {kind!r}.")
    dtype = np.dtype(data["dtype"])
    if kind == "Discrete":
        return _named(kind, n=int(data["n"]), start=int(data["start"]), shape=(), dtype=dtype)
    if kind == "MultiDiscrete":
        nvec = np.array(data["nvec"], np.int64)
        return _named(kind, nvec=nvec, start=np.array(data["start"], np.int64), shape=nvec.shape, dtype=dtype)
    shape, sides = tuple(int(n) for n in data["shape"]), {}
    for side, endless in (("low", -np.inf), ("high", np.inf)) if "low" in data else ():
        bound = data[side] if isinstance(data[side], list) else [data[side]] * int(np.prod(shape))
        sides[side] = np.array([endless if x is None else x for x in bound], float).astype(dtype).reshape(shape)
    return _named(kind, shape=shape, dtype=dtype, **sides)


def _named(kind: str, **attributes: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(**attributes)
