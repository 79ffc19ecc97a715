"""Arrays of a loop of the user's own as frames and batches, which learners take: looked over, and completed.

Arrays are numpy's or tensors, by name. Those of agents are {group: [T, B, N, ...]}; a world of one group may leave the group
out, and a group of one agent its dimension N. To act there is no T.

    obs, next_obs               what was seen, and the true next observations: never those after a reset
    action, and log_prob ...    what `act` recorded
    reward                      what is learnt from
    terminated, truncated       who ended, and who was cut off; truncated left out: nobody
    over                        [T, B] whose episode ended; left out: where all are terminated, truncated or gone
    start                       where agents begin, or whole rows [T, B]; left out: in the first of these steps, and as above
    alive, next_alive           of mortal groups; left out: everybody, and next whoever did not end
    next_start                  of mortal groups; left out: who is there next and was not
    active, next_active         whose turn it is, in worlds of turns
    legal, next_legal           of masked groups; where all choices are forbidden, none is
    state, next_state           [T, B, S] of worlds that have one
    memory                      what `act` was given at the first of these steps
    filled, weight              [T, B] what belongs to a sequence; [B] its importance
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.ids import near
from shoal.spec import Batch, Box, EnvSpec, Frame, Group, Result, Shape, Space, UserError, View
from shoal.tree import tree_leaves

Extras = dict[str, dict[str, Shape]]  # group -> what `act` leaves beside an action, and its shape for each agent
OF_WORLDS = ("state", "next_state", "over", "filled", "weight", "memory")


class Field(NamedTuple):
    """What an array of agents must be."""

    shape: Any = ()  # for each agent; of observations perhaps by name
    cast: Callable[[Tensor], Tensor] = Tensor.bool
    needed: bool = False
    without: str | None = None  # what the spec does not say, so that the array would say nothing


def fields_of(spec: EnvSpec, g: Group, extras: dict[str, Shape]) -> dict[str, Field]:
    """Those of a group, by name."""
    space, mortal = g.action, None if g.mortal else "Group(mortal=True)"
    turns, masked = None if spec.turns else "EnvSpec(turns=True)", None if g.masked else "Group(masked=True)"
    choices = () if isinstance(space, Box) else (sum(space.sizes),)
    return {
        **dict.fromkeys(("obs", "next_obs"), Field(g.obs, Tensor.contiguous, True)),
        "action": Field(space.shape, Tensor.float if isinstance(space, Box) else Tensor.long, True),
        "reward": Field((), Tensor.float, True),
        "terminated": Field(needed=True),
        **dict.fromkeys(("truncated", "start"), Field()),
        **dict.fromkeys(("alive", "next_alive", "next_start"), Field(without=mortal)),
        **dict.fromkeys(("active", "next_active"), Field(needed=spec.turns, without=turns)),
        **dict.fromkeys(("legal", "next_legal"), Field(choices, lambda x: _free(x.bool(), space), g.masked, masked)),
        **{name: Field(shape, Tensor.float, True) for name, shape in extras.items()},
    }


def _free(legal: Tensor, space: Space) -> Tensor:
    """A mask [..., A] that forbids everything, as that of the gone, forbids nothing."""
    assert not isinstance(space, Box)
    return torch.cat([x | ~x.any(-1, keepdim=True) for x in legal.split(space.sizes, -1)], -1)


class Arrays:
    """Those of one call. `lead` is T and B, or B alone: as many dimensions as there are letters."""

    def __init__(self, spec: EnvSpec, given: Any, letters: str, device: torch.device, extras: Extras | None = None):
        if not isinstance(given, Mapping):
            raise UserError(f"arrays come in a dict by name, and not in a {type(given).__name__}.")
        self.spec, self.letters, self.device = spec, letters, device
        self.given = {k: x for k, x in given.items() if x is not None}
        self.fields = {g.name: fields_of(spec, g, (extras or {}).get(g.name, {})) for g in spec.groups}
        known = [*dict.fromkeys(name for fields in self.fields.values() for name in fields), *OF_WORLDS]
        for name in self.given:
            if name not in known:
                raise UserError(f"there is no array {name!r}{near(str(name), known)}: there are {', '.join(known)}.")
        self.lead = self._shape("obs", self.first_obs(spec.groups[0]))[: len(letters)]
        if len(self.lead) < len(letters):
            raise UserError(f"`obs` has too few dimensions: it begins with {', '.join(letters)}.")

    # --- of agents ---

    def by_group(self, name: str) -> bool:
        """Whether an array came in a dict by group, and not bare."""
        value, (g, *more) = self.given.get(name), self.spec.groups
        return isinstance(value, Mapping) and (bool(more) or not isinstance(g.obs, dict) or set(value) != set(g.obs))

    def of_group(self, name: str, g: Group) -> Any:
        """An array of a group, as it was given; none where it was left out and may be."""
        value, names, field = self.given.get(name), [x.name for x in self.spec.groups], self.fields[g.name][name]
        if self.by_group(name):
            for key in value:  # type: ignore[union-attr]
                if key not in names:
                    raise UserError(f"`{name}` has no group {key!r}{near(str(key), names)}: there are {', '.join(names)}.")
            value = value.get(g.name)  # type: ignore[union-attr]
        elif value is not None and len(names) > 1:
            raise UserError(f"`{name}` takes a dict with an array for each group: {', '.join(names)}.")
        if value is None and field.needed:
            raise UserError(f"there is no `{name}` of {g.name!r}, which is needed here.")
        if value is not None and field.without is not None:
            raise UserError(f"`{name}` says nothing of {g.name!r}, whose spec is without {field.without}: leave it out.")
        return value

    def first_obs(self, g: Group) -> Any:
        """Observations of a group, or the first part of them."""
        obs = self.of_group("obs", g)
        return self._part("obs", obs, next(iter(g.obs)), g) if isinstance(g.obs, dict) else obs

    def tensor(self, name: str, g: Group) -> Any:
        """The same as a tensor [*lead, N, ...], of named parts a dict of them."""
        if (
            name == "start" and not self.by_group(name) and self._shape(name, self.given.get(name, 0)) == self.lead
        ):  # of whole rows
            return self.world(name, self.lead).bool()[..., None].expand(*self.lead, g.n)
        value, field = self.of_group(name, g), self.fields[g.name][name]
        if value is None:
            return None
        if isinstance(field.shape, dict):
            parts = {k: self._part(name, value, k, g) for k in field.shape}
            return {k: self._shaped(f"{name}[{k!r}]", x, field.shape[k], g) for k, x in parts.items()}
        x = self._shaped(name, value, field.shape, g)
        if field.cast is Tensor.long and x.is_floating_point():
            raise UserError(f"`{name}` of {g.name!r} has fractions, and choices are whole numbers.")
        return field.cast(x)

    def _part(self, name: str, value: Any, part: str, g: Group) -> Any:
        if not isinstance(value, Mapping) or part not in value:
            named = ", ".join(map(str, g.obs))
            raise UserError(f"`{name}` of {g.name!r} is a dict of {named}, and there is no {part!r}.")
        return value[part]

    def _shaped(self, name: str, value: Any, shape: Shape, g: Group) -> Tensor:
        x = self._tensor(name, value)
        if g.n == 1 and x.shape == (*self.lead, *shape):
            x = x.unsqueeze(len(self.lead))
        if x.shape != (wanted := (*self.lead, g.n, *shape)):
            form = ", ".join((*self.letters, "N", *map(str, shape)))
            raise UserError(f"`{name}` of {g.name!r} is {list(x.shape)}: it must be [{form}], here {list(wanted)}.")
        return x

    # --- of the world ---

    def world(self, name: str, shape: Shape) -> Any:
        """An array as a tensor of this shape; none where it was left out."""
        if name not in self.given:
            return None
        x = self._tensor(name, self.given[name])
        if x.shape != shape:
            raise UserError(f"`{name}` is {list(x.shape)}: it must be {list(shape)} here.")
        return x

    def state(self, name: str, needed: bool = True) -> Tensor | None:
        if self.spec.state is None and name in self.given:
            raise UserError(f"`{name}` says nothing in a world whose spec has no state: leave it out.")
        x = None if self.spec.state is None else self.world(name, (*self.lead, self.spec.state))
        if x is None and self.spec.state is not None and needed:
            raise UserError(f"there is no `{name}`, [{', '.join(self.letters)}, {self.spec.state}], which is needed here.")
        return None if x is None else x.float()

    def _shape(self, name: str, value: Any) -> Shape:
        try:
            return tuple(np.shape(value))
        except ValueError as e:  # a ragged list
            raise UserError(f"`{name}` is no array of numbers: {e}.") from None

    def _tensor(self, name: str, value: Any) -> Tensor:
        try:
            x = value if isinstance(value, Tensor) else torch.as_tensor(np.ascontiguousarray(value))
        except (TypeError, ValueError) as e:
            raise UserError(f"`{name}` is no array of numbers: {e}.") from None
        return x.detach().to(self.device, torch.float if x.dtype == torch.double else x.dtype)


def frame_of(arrays: Arrays, start: bool = True, state_needed: bool = False) -> Frame:
    """A frame to act in; `start`: whether agents begin, where arrays do not say."""
    views = {}
    for g in arrays.spec.groups:
        yes = torch.ones(*arrays.lead, g.n, dtype=torch.bool, device=arrays.device)
        alive, active, begins = (arrays.tensor(k, g) for k in ("alive", "active", "start"))
        alive = yes if alive is None else alive
        begins = yes & start if begins is None else begins
        views[g.name] = View(
            arrays.tensor("obs", g), alive, alive if active is None else active, begins, arrays.tensor("legal", g)
        )
    return Frame(views, arrays.state("state", state_needed))


def batch_of(arrays: Arrays, extras: Extras, memory: dict[str, Any]) -> Batch:
    """What happened, of all groups."""
    groups = arrays.spec.groups
    now, then, results = dict[str, View](), dict[str, View](), dict[str, Result]()
    of = {g.name: {k: arrays.tensor(k, g) for k in arrays.fields[g.name]} for g in groups}
    yes = {g.name: torch.ones(*arrays.lead, g.n, dtype=torch.bool, device=arrays.device) for g in groups}
    for name, x in of.items():
        x["alive"] = yes[name] if x["alive"] is None else x["alive"]
        x["truncated"] = ~yes[name] if x["truncated"] is None else x["truncated"]
    over = arrays.world("over", arrays.lead)
    if over is None:
        over = torch.cat([x["terminated"] | x["truncated"] | ~x["alive"] for x in of.values()], -1).all(-1)
    over = over.bool()
    for g in groups:
        x, alive = of[g.name], of[g.name]["alive"]
        if not g.mortal and bool((x["truncated"] & ~over[..., None]).any()):
            raise UserError(
                f"`truncated` cuts agents of {g.name!r} off whose row goes on: say so of all, hand over `over`, or let the "
                "group be `mortal`."
            )
        ended = x["terminated"] | (x["truncated"] & ~over[..., None])  # who is cut off with all others is there to be seen
        left_out = {
            "next_alive": alive & ~ended if g.mortal else yes[g.name],
            "start": torch.cat((alive[:1], alive[1:] & (over[:-1, :, None] | ~alive[:-1]))),
        }
        x |= {k: v for k, v in left_out.items() if x[k] is None}
        next_alive = x["next_alive"]
        for name, there in (("obs", alive), ("next_obs", next_alive), ("reward", alive)):
            _require_finite(name, g.name, x[name], there)
        next_start = next_alive & ~alive if x["next_start"] is None else x["next_start"]
        active, next_active = (alive, next_alive) if x["active"] is None else (x["active"], x["next_active"])
        now[g.name] = View(x["obs"], alive, active, x["start"], x["legal"])
        then[g.name] = View(x["next_obs"], next_alive, next_active, next_start, x["next_legal"])
        results[g.name] = Result(x["reward"], x["terminated"])
    frames = Frame(now, arrays.state("state")), Frame(then, arrays.state("next_state"))
    filled, weight = arrays.world("filled", arrays.lead), arrays.world("weight", arrays.lead[1:])
    return Batch(
        *frames,
        {name: x["action"] for name, x in of.items()},
        results,
        over,
        {name: {k: x[k] for k in extras.get(name, {})} for name, x in of.items()},
        memory,
        {name: r.reward for name, r in results.items()},
        weight=None if weight is None else weight.float(),
        filled=None if filled is None else filled.bool(),
    )


def _require_finite(name: str, group: str, x: Any, alive: Tensor) -> None:
    """What the dead see may be anything."""
    for part in tree_leaves(x):
        if part.is_floating_point() and not (part.isfinite().reshape(*alive.shape, -1).all(-1) | ~alive).all():
            raise UserError(f"`{name}` of {group!r} has numbers that are not finite: nobody learns from them.")
