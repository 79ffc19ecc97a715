"""What acts after training, in the environment's own language.

    policy = shoal.load("runs/simple_spread/mappo/...")
    print(policy)                                       # who plays what: what each agent sees and does
    memory = None                                       # an episode begins
    while world.agents:                                 # whoever has just died sees something once more: leave them out
        actions, memory = policy.act({a: observations[a] for a in world.agents}, memory, infos)
        observations, rewards, terminations, truncations, infos = world.step(actions)

Observations and actions are exactly those of the environment's own loop: its numbering (`Discrete(3, start=1)`), shapes, names,
channel order, nesting. How they are converted was saved with the run (`envs/conversions.py`), so that neither the environment
nor its library is needed.

    dict by agent       as PettingZoo has it: the agents that are there; where they move in turn, the one to move
    sequence            of all agents in their order, as level-based foraging or VMAS have it
    bare                of the only agent, as Gymnasium has it; a bare action comes back

One world, or a batch of them: every array has one dimension more in front, as in Gymnasium's vector environments. Rows in which
an episode begins are told by `start` [B], agents that are gone from some of the rows by `alive` {agent: [B]}.

Legal choices are taken from where the environment puts them: the observation's `action_mask`, or that of `infos`; `masks` gives
them by hand. A policy that was trained with masks does not act without. Actions are greedy, or `sampled` as in training, which
games of mixed strategies want; draws go on from call to call, from the `seed` of `shoal.load`. Memory that was passed in stays
as it was: a step can be taken twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.envs.conversions import MASK, Conversion, restored
from shoal.envs.pixels import Pixels
from shoal.envs.spaces import Moves, allow, kind_of
from shoal.ids import near
from shoal.spec import Box, Frame, Group, UserError, View
from shoal.training.collect import Players, to_space
from shoal.tree import tree_map

Space = Any  # of Gymnasium's kinds
Tree = Any  # of arrays, nested as a space is


@dataclass(frozen=True)
class Memory:
    """What `act` hands back, to be passed in again."""

    state: dict[str, Any]  # of the nets: group -> a tree of [B, N, ...]
    present: dict[str, Tensor]  # group -> [B, N] who was there in the last step; in turn-based worlds who has been
    pictures: dict[str, list[dict[str, np.ndarray]]]  # agent -> of each row the pictures that are stacked


@dataclass(frozen=True)
class Seat:
    """Where an agent sits, and how it sees and moves."""

    group: Group
    i: int
    conversion: Conversion
    observer: Any
    moves: Moves
    sees: Space  # as its environment has it
    does: Space


class Policy:
    """Acts for every agent of a world; `policy.py` says what it takes."""

    def __init__(self, players: Players, agents: dict[str, Conversion], device: torch.device, seed: int = 0, name: str = ""):
        self.players, self.spec, self.device, self.name = players, players.spec, device, name
        self.generator = torch.Generator(device=device).manual_seed(seed)
        groups = {a: (g, i) for g in self.spec.groups for i, a in enumerate(g.agents)}
        self.seats = {a: self._seat(*groups[a], c) for a, c in agents.items()}  # in the environment's order

    @staticmethod
    def _seat(group: Group, i: int, c: Conversion) -> Seat:
        return Seat(group, i, c, c.observer(group), c.moves(), restored(c.observation), restored(c.action))

    def __repr__(self) -> str:
        lines = [f"Policy({self.name}" if self.name else "Policy("]
        for g in self.spec.groups:
            seat = self.seats[g.agents[0]]
            where = {None: "masks=", "info": f"infos' {MASK}", "observation": f"the observation's {MASK}"}[seat.conversion.mask]
            legal = f", legal choices from {where}" if g.masked else ""
            held = f", each held for {seat.conversion.hold} frames" if seat.conversion.hold > 1 else ""
            lines.append(f"  {g.name} ({', '.join(g.agents)}): sees {_words(seat.sees)}, does {_words(seat.does)}{held}{legal}")
        return "\n".join(lines) + ")"

    @torch.no_grad()
    def act(
        self,
        observations: Any,
        memory: Memory | None = None,
        infos: Any = None,
        *,
        masks: Any = None,
        alive: Mapping[Any, Any] | None = None,
        start: Any = None,
        sampled: bool = False,
    ) -> tuple[Any, Memory]:
        """Actions for the agents that `observations` speaks of, in the same form, and the memory to pass back in."""
        given, answer = self._by_agent(observations)
        infos, masks = self._infos(infos), {} if masks is None else self._by_agent(masks)[0]
        if memory is not None and not isinstance(memory, Memory):
            raise UserError(
                f"memory is a {type(memory).__name__}: it takes what `act` gave back, or none where an episode begins."
            )
        seen = {a: _arrays(self.seats[a].sees, x, f"the observation of {a!r}") for a, x in given.items()}
        rows, batch = self._rows(seen)
        if memory is None:
            absent = {g.name: torch.zeros(rows, g.n, dtype=torch.bool, device=self.device) for g in self.spec.groups}
            memory = Memory(self.players.memory(rows, self.device), absent, {})
        if (had := len(next(iter(memory.present.values())))) != rows:
            raise UserError(f"the memory is of {had} worlds, and the observations are of {rows}: begin with memory none.")
        there = self._there(seen, rows, alive)
        begins = self._flags(False if start is None else start, rows)
        before = {g: x & ~begins for g, x in memory.present.items()}
        new = {g: x & ~before[g] for g, x in there.items()}
        obs, pictures = self._observed(seen, batch, there, new, memory)
        worlds = rows if batch else None
        legal = {g.name: self._legal(g, seen, worlds, there[g.name], infos, masks) for g in self.spec.groups}
        present = {g: x | before[g] if self.spec.turns else x for g, x in there.items()}  # who waits is not gone
        frame = Frame({g: View(obs[g], present[g], x, new[g], legal[g]) for g, x in there.items()})
        noise = self.players.noise(self.generator, rows)
        chosen, state, _ = self.players.act(frame, memory.state, noise, explore=sampled, greedy=not sampled)
        taken = {g.name: to_space(g.action, chosen[g.name]).cpu().numpy() for g in self.spec.groups}
        actions = {a: self._action(self.seats[a], taken, batch) for a in given}
        if any(isinstance(x, Tensor) for a in given for x in _leaves(given[a])):
            actions = {a: _map_arrays(torch.from_numpy, x) for a, x in actions.items()}
        return answer(actions), Memory(state, present, pictures)

    # --- who speaks ---

    def _by_agent(self, value: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
        """{agent: what is its own}, and how such a dict is put back into the form that it came in."""
        names = list(self.seats)
        if isinstance(value, Mapping) and (len(names) > 1 or {str(k) for k in value} <= {*names}):
            for key in value:
                if str(key) not in self.seats:
                    raise UserError(f"there is no agent {key!r}{near(str(key), names)}: this policy plays {', '.join(names)}.")
            return {str(k): x for k, x in value.items()}, lambda out: {k: out[str(k)] for k in value}
        if len(names) == 1:
            return {names[0]: value}, lambda out: out[names[0]]
        if not isinstance(value, list | tuple | np.ndarray | Tensor) or len(value) != len(names):
            has = f"{len(value)} things" if isinstance(value, list | tuple | np.ndarray | Tensor) else type(value).__name__
            raise UserError(
                f"this policy plays {', '.join(names)}, and was given {has}: it takes a dict by agent, or one for each."
            )

        def answer(out: dict[str, Any]) -> Any:
            each = [out[a] for a in names]
            if isinstance(value, list | tuple):
                return type(value)(each)
            return np.stack(each) if isinstance(value, np.ndarray) else torch.stack([torch.as_tensor(x) for x in each])

        return dict(zip(names, value, strict=True)), answer

    def _infos(self, infos: Any) -> dict[str, Any]:
        """{agent: its info}; what is nobody's is left out."""
        names = list(self.seats)
        if isinstance(infos, Mapping):
            mine = {str(k): x for k, x in infos.items() if str(k) in self.seats}
            return mine if mine or len(names) > 1 else {names[0]: infos}
        return dict(zip(names, infos, strict=False)) if isinstance(infos, list | tuple) else {}

    def _rows(self, seen: dict[str, Tree]) -> tuple[int, bool]:
        """How many worlds there are, and whether they came as a batch."""
        leads: dict[tuple[int, ...], str] = {}
        for a, tree in seen.items():
            for leaf, x in _pairs(self.seats[a].sees, tree):
                lead = x.shape[: x.ndim - len(leaf.shape)]
                if x.shape[len(lead) :] != tuple(leaf.shape) or len(lead) > 1:
                    takes = tuple(leaf.shape)
                    raise UserError(f"the observation of {a!r} has shape {x.shape}; this policy takes {takes}.")
                leads.setdefault(lead, a)
        if len(leads) > 1:
            (one, a), (other, b) = list(leads.items())[:2]
            raise UserError(f"the observations of {a!r} are of {one or 'one world'}, those of {b!r} of {other or 'one world'}.")
        lead = next(iter(leads), ())
        return (lead[0], True) if lead else (1, False)

    def _there(self, seen: dict[str, Tree], rows: int, alive: Mapping[Any, Any] | None) -> dict[str, Tensor]:
        """Group -> [B, N] who is there."""
        there = {g.name: torch.zeros(rows, g.n, dtype=torch.bool, device=self.device) for g in self.spec.groups}
        lives = self._by_agent(alive)[0] if alive is not None else {}
        for a in seen:
            seat = self.seats[a]
            there[seat.group.name][:, seat.i] = self._flags(lives[a], rows)[:, 0] if a in lives else True
        return there

    def _flags(self, value: Any, rows: int) -> Tensor:
        flags = torch.as_tensor(np.asarray(value, bool), device=self.device)
        if flags.shape not in ((), (rows,)):
            raise UserError(f"start and alive are a flag for each of the {rows} worlds, and {tuple(flags.shape)} were given.")
        return flags.expand(rows)[:, None]

    # --- conversions ---

    def _observed(
        self, seen: dict[str, Tree], batch: bool, there: dict[str, Tensor], new: dict[str, Tensor], memory: Memory
    ) -> tuple[dict[str, Any], dict[str, list[dict[str, np.ndarray]]]]:
        """What each group sees, [B, N, *O]; zeros for those who are not there. And the pictures that are stacked next time."""
        out: dict[str, Any] = {}
        pictures = dict(memory.pictures) if self.spec.turns else {}  # who waits keeps its own
        for g in self.spec.groups:
            mine = [a for a in g.agents if a in seen]
            live, begins = there[g.name].cpu().numpy(), new[g.name].cpu().numpy()
            shapes = g.obs if isinstance(g.obs, dict) else {"": g.obs}
            whole = {k: np.zeros((*live.shape, *s), self._dtype(g, k, s, mine, seen)) for k, s in shapes.items()}
            for a in mine:
                seat = self.seats[a]
                if seat.observer.plain:
                    for k, x in whole.items():
                        x[:, seat.i] = seen[a][k] if k else seen[a]
                        x[~live[:, seat.i], seat.i] = 0
                    continue
                stacks, past = isinstance(seat.observer, Pixels), memory.pictures.get(a)
                pictures[a] = [{}] * len(live) if stacks else []
                for b in np.flatnonzero(live[:, seat.i]):
                    place = {k: x[b, seat.i] for k, x in whole.items()}
                    if stacks:
                        seat.observer.past = dict(past[b]) if past else {}
                    obs = _map_arrays(itemgetter(b), seen[a]) if batch else seen[a]
                    seat.observer.write(obs, place if isinstance(g.obs, dict) else place[""], bool(begins[b, seat.i]))
                    if stacks:
                        pictures[a][b] = seat.observer.past
            for x in whole.values():
                if x.dtype == np.float32 and not np.isfinite(x).all():
                    i = int(np.argwhere(~np.isfinite(x))[0, 1])
                    raise UserError(f"the observation of {g.agents[i]!r} holds a number that is not finite.")
            named = {k: torch.from_numpy(x).to(self.device) for k, x in whole.items()}
            out[g.name] = named if isinstance(g.obs, dict) else named[""]
        return out, pictures

    def _dtype(self, g: Group, part: str, shape: Any, mine: list[str], seen: dict[str, Tree]) -> Any:
        """Of a part of what a group sees: pictures are of bytes, or of floats."""
        if len(shape) != 3:
            return np.float32
        kinds = {self.seats[a].observer.images for a in g.agents}
        if kinds != {None}:
            return np.float32 if np.float32 in kinds else np.uint8
        given = {(seen[a][part] if part else seen[a]).dtype for a in mine}  # a native world's, as they are
        return np.uint8 if given == {np.dtype(np.uint8)} else np.float32

    def _legal(
        self, g: Group, seen: dict[str, Tree], rows: int | None, there: Tensor, infos: dict[str, Any], masks: dict[str, Any]
    ) -> Tensor | None:
        """[B, N, A] legal choices; none where the world has no such. `rows` of a batch; none: there is one world."""
        mine = [a for a in g.agents if a in seen]
        if isinstance(g.action, Box) or not (g.masked or any(a in masks for a in mine)):
            return None
        live = there.cpu().numpy()
        legal = np.ones((*live.shape, sum(g.action.sizes)), bool)
        for a in mine if g.masked else [a for a in mine if a in masks]:
            mask, i = self._mask(a, seen[a], infos.get(a), masks), g.agents.index(a)
            if mask is None:
                raise UserError(
                    f"this policy was trained with masks, and there is none for {a!r}: hand over the environment's infos, or "
                    f"masks={{{a!r}: ...}}."
                )
            each = _masks(mask, rows, a)
            for b in np.flatnonzero(live[:, i]):
                if a in masks:
                    _refuse_nothing(each[b], g, a)
                allow(each[b], g.action, legal[b, i])
        return torch.from_numpy(legal).to(self.device)

    def _mask(self, a: str, seen: Tree, info: Any, masks: dict[str, Any]) -> Any:
        if a in masks:
            return masks[a]
        if self.seats[a].conversion.mask == "observation":
            return seen[MASK]
        return info.get(MASK) if isinstance(info, Mapping) else None

    def _action(self, seat: Seat, taken: dict[str, np.ndarray], batch: bool) -> Any:
        values = taken[seat.group.name][:, seat.i]
        each = [seat.moves.read(x.reshape(seat.moves.space.shape)) for x in values]
        if batch:
            return _stacked(each, seat.does)
        return int(each[0]) if kind_of(seat.does) == "Discrete" else each[0]


# --- trees of arrays, nested as a space is ----------------------------------------------------------------------------


def _arrays(space: Space, value: Any, what: str) -> Tree:
    """An observation as arrays, or a sentence where it is not of this space; shapes are looked at later."""
    kind = kind_of(space)
    if kind == "Dict":
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            has = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise UserError(f"{what} is {has}: it must be a dict of {' and '.join(map(str, space.spaces))}.")
        return {k: _arrays(x, value[k], what) for k, x in space.spaces.items()}
    if kind == "Tuple":
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise UserError(f"{what} is a {type(value).__name__}: it must be a tuple of {len(space.spaces)}.")
        return tuple(_arrays(x, v, what) for x, v in zip(space.spaces, value, strict=True))
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} is not made of numbers: this policy takes {_words(space)}.")
    if kind in ("Discrete", "MultiDiscrete"):
        low, n = np.asarray(space.start), np.asarray(space.n if kind == "Discrete" else space.nvec)
        fits = array.shape[array.ndim - low.ndim :] == low.shape
        if fits and not ((array >= low) & (array < low + n) & (array == np.floor(array))).all():
            raise UserError(f"{what} is {array}: this policy takes {_words(space)}.")
        array = array.astype(np.int64)
    return array


def _pairs(space: Space, tree: Tree) -> list[tuple[Space, np.ndarray]]:
    """The simple spaces in a space, each with its array."""
    if isinstance(tree, dict):
        return [p for k, x in space.spaces.items() for p in _pairs(x, tree[k])]
    if isinstance(tree, tuple):
        return [p for x, t in zip(space.spaces, tree, strict=True) for p in _pairs(x, t)]
    return [(space, tree)]


def _leaves(tree: Any) -> list[Any]:
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else None
    return [tree] if parts is None else [x for p in parts for x in _leaves(p)]


def _map_arrays(f: Callable[[np.ndarray], Any], tree: Tree) -> Any:
    return tree_map(lambda x: f(x) if isinstance(x, np.ndarray) else x, tree)


def _stacked(trees: list[Any], space: Space) -> Any:
    """The actions of several worlds as one, every array with one dimension more."""
    kind = kind_of(space)
    if kind == "Dict":
        return {k: _stacked([t[k] for t in trees], x) for k, x in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_stacked([t[i] for t in trees], x) for i, x in enumerate(space.spaces))
    return np.array(trees, space.dtype).reshape(len(trees), *space.shape)


def _masks(mask: Any, rows: int | None, agent: str) -> np.ndarray:
    """An agent's mask in every world, [B, A]; of several choices it may be a tuple, one each."""
    try:
        parts = mask if isinstance(mask, tuple) else (mask,)
        return np.concatenate([np.asarray(m).reshape(1 if rows is None else rows, -1) for m in parts], 1)
    except ValueError:
        raise UserError(f"the mask of {agent!r} is not one for each of {rows or 1} worlds and every choice.") from None


def _refuse_nothing(mask: np.ndarray, g: Group, agent: str) -> None:
    """A mask that the caller made must allow something of every choice."""
    assert not isinstance(g.action, Box)
    n = sum(g.action.sizes)
    if mask.shape != (n,):
        raise UserError(f"the mask of {agent!r} has shape {mask.shape}; this policy takes {(n,)}.")
    if not all(x.any() for x in np.split(mask, np.cumsum(g.action.sizes)[:-1])):
        raise UserError(f"the mask of {agent!r} allows no choice at all: every choice to be made needs a legal one.")


def _words(space: Space) -> str:
    """A space in a few words: Box(18), Discrete(1 to 3), Dict(camera: Box(64, 64, 3) of uint8, imu: Box(6))."""
    kind = kind_of(space)
    if kind == "Dict":
        return f"Dict({', '.join(f'{k}: {_words(x)}' for k, x in space.spaces.items())})"
    if kind == "Tuple":
        return f"Tuple({', '.join(_words(x) for x in space.spaces)})"
    if kind == "Discrete":
        return f"Discrete({space.start} to {space.start + space.n - 1})"
    if kind == "MultiDiscrete":
        ends = zip(np.ravel(space.start), np.ravel(space.start + space.nvec) - 1, strict=True)
        return f"MultiDiscrete({', '.join(f'{a} to {b}' for a, b in ends)})"
    numbers = "" if space.dtype == np.float32 else f" of {space.dtype}"
    return f"{kind}({', '.join(map(str, space.shape))}){numbers}"
