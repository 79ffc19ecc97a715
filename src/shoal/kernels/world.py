"""Makes one kernel of the step of a native world, whose steps are some sixty small operations on [B, few, few].

`fuse(world)` runs `world._transition` once, on a clone with `ROWS` rows, under the tracer (`kernels/trace.py`). The result is a
program for one row. `kernels/emit.py` writes it as C, which `cc` compiles for the CPU, or as CUDA C, which NVRTC compiles;
NVRTC comes with PyTorch. Each kernel is then run on the clone's rows, and compared with the result of the operations there.
A kernel that disagrees is not used.

Constants of the kernel are the config and every tensor that the world holds, which must be the same for all rows. Tensors of
no dimension, such as the `stage` of a curriculum, are read in each call. So a world may change its 0-dimensional tensors, in
place or by assignment, and must not change others after `fuse`. An operation that is not in the table, or that mixes rows (a
mean over rows, a slice of them), makes `fuse` return a sentence that says so, and the world stays as it was.

A fused step returns the same tree as the plain one. Tensors of the state are new in each call, or are those passed in where
nothing changed them. Other tensors may be shared: one tensor where expressions are equal, and one for all calls where a
tensor is constant. Products with literal zeros of a matrix are left out. An index out of range is not noticed: it picks one of
the choices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shoal.kernels import emit
from shoal.kernels.compiler import CannotFuse, library
from shoal.kernels.scalars import Node
from shoal.kernels.trace import ROWS, Tracer
from shoal.spec import Box, EnvSpec, Frame, Outcome
from shoal.tree import tree_leaves

BLOCK = 64  # rows of a block on CUDA
FLAGS = ("-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC", "-lm")
State = dict[str, Tensor]
Phase = Literal["middle", "last", "any"]  # as in envs/base.py


class World(Protocol):
    """What `fuse` asks of a world: `envs/base.World` has it."""

    config: Any
    rows: int
    device: torch.device
    dtype: torch.dtype
    spec: EnvSpec
    noise: int
    state: State
    _do: Callable[[Phase, State, dict[str, Tensor], Tensor], tuple[State, Outcome]]

    def __init__(self, config: Any, rows: int, device: str | torch.device, dtype: torch.dtype): ...

    @property
    def phases(self) -> tuple[Phase, ...]: ...

    def reset(self, noise: Tensor) -> Frame: ...

    def tensor(self, x: Any) -> Tensor: ...

    def _transition(self, phase: Phase, state: State, actions: dict[str, Tensor], noise: Tensor) -> tuple[State, Outcome]: ...


class Program:
    """The step of a world in one phase, traced: inputs, the cells that a kernel writes, and the tree that a call returns."""

    def __init__(self, world: World, phase: Phase):
        clone, tracer = type(world)(world.config, ROWS, "cpu", world.dtype), Tracer()
        refuse_changed(clone, world)
        self.example = state, actions, noise = example(clone)
        for place, part in (("state", state), ("actions", actions)):
            for key, x in part.items():
                tracer.add_input(f"{place}[{key!r}]", x)
        tracer.add_input("noise", noise)
        for name, x in vars(clone).items():
            if isinstance(x, Tensor) and x.dim() == 0:
                tracer.add_input(f"world.{name}", x)
        before = attributes(clone)
        with tracer:
            result = clone._transition(phase, *self.example)
        if (changed := [k for k, v in attributes(clone).items() if before.get(k) != v]) or (
            before.keys() - attributes(clone).keys()
        ):
            raise CannotFuse(f"its step changes {changed[0] if changed else 'an attribute'!r}, which is not in its state")
        self.clone, self.result, self.inputs, self.traced = clone, result, tracer.inputs, tracer.traced
        self.groups: dict[Any, list[tuple[Node, ...]]] = {}  # cells to write, by dtype and shape: one allocation each
        self.constants: dict[Any, tuple[str, Tensor]] = {}
        self.shared: dict[Any, str] = {}
        self.names: dict[str, Any] = {}  # classes in the text of the tree
        self.parts: dict[int, str] = {}  # id of a dataclass in the tree -> its variable
        self.unchanged: set[int] = set()  # inputs that are returned as they came
        new = ", ".join(f"{k!r}: {self.leaf(v, f'state[{k!r}]')}" for k, v in result[0].items())
        self.tree = f"{{{new}}}, {self.text(result[1])}"
        seen: set[Node] = set()
        todo = [n for cells in self.groups.values() for leaf in cells for n in leaf]
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += [x for x in node.args if isinstance(x, Node)]
        self.order = [n for n in tracer.graph.nodes.values() if n in seen]
        self.loaded = sorted({n.args[0] for n in self.order if n.op == "load"})

    def text(self, tree: Any) -> str:
        """The tree as a Python expression. A part that occurs twice is made once."""
        if tree is None or isinstance(tree, Tensor):
            return "None" if tree is None else self.leaf(tree)
        if isinstance(tree, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in tree.items()) + "}"
        if not is_dataclass(tree):
            raise CannotFuse(f"its outcome holds a {type(tree).__name__}")
        if id(tree) in self.parts:
            return self.parts[id(tree)]
        self.names[type(tree).__name__] = type(tree)
        name = self.parts[id(tree)] = f"part{len(self.parts)}"
        return f"({name} := {type(tree).__name__}({', '.join(self.text(getattr(tree, f.name)) for f in fields(tree))}))"

    def leaf(self, x: Tensor, source: str = "") -> str:
        """The variable of a tensor in the tree. `source`: the tensor belongs to the state, and shares no memory, because the
        owner of a state may write to it."""
        if x.dim() == 0 or x.shape[0] != ROWS:
            raise CannotFuse(f"there is a tensor of shape {tuple(x.shape)} in its outcome, with no dimension for the rows")
        cells: tuple[Node, ...] = tuple(self.traced(x).cells.flat)
        key = x.dtype, x.shape[1:]
        if not source and all(n.op == "lit" for n in cells):
            return self.constants.setdefault((*key, cells), (f"k{len(self.constants)}", x[:1]))[0]
        i = cells[0].args[0] if cells and cells[0].op == "load" else -1
        if source and i >= 0 and self.inputs[i][0] == source and cells == tuple(self.traced(self.inputs[i][1]).cells.flat):
            self.unchanged.add(i)
            return f"x{i}"
        if source or (*key, cells) not in self.shared:
            group = self.groups.setdefault(key, [])
            group.append(cells)
            name = f"y{list(self.groups).index(key)}_{len(group) - 1}"
            return name if source else self.shared.setdefault((*key, cells), name)
        return self.shared[*key, cells]

    def write(self, device: str) -> str:
        """The source of the kernel, for "cpu" or "cuda"."""
        outputs = [(dtype, leaves) for (dtype, _), leaves in self.groups.items()]
        return emit.write(device, self.order, [x for _, x in self.inputs], self.loaded, outputs)

    def bind(self, kernel: Any, world: World) -> Callable[..., tuple[Any, Outcome]]:
        """The function that a step calls: it checks arguments, allocates outputs, runs the kernel and builds the tree."""
        rows, device = world.rows, world.device

        def fit(x: Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> Tensor:
            if x.shape != shape:
                raise ValueError(f"{name} has the shape {tuple(x.shape)}, and should have {tuple(shape)}.")
            if x.is_floating_point() and not dtype.is_floating_point:
                raise ValueError(f"{name} is {x.dtype}, and should be {dtype}.")
            return x.to(device, dtype).contiguous()

        space: dict[str, Any] = {**self.names, "fit": fit, "kernel": kernel, "world": world, "empty_like": torch.empty_like}
        space |= {name: x.to(device).repeat(rows, *[1] * (x.dim() - 1)) for name, x in self.constants.values()}
        lines = ["def call(state, actions, noise):"]
        here = "is_cpu" if device.type == "cpu" else f"is_{device.type}"
        for i in sorted({*self.loaded, *self.unchanged}):
            source, x = self.inputs[i]
            space |= {f"s{i}": torch.Size((rows, *x.shape[1:])) if x.dim() else x.shape, f"d{i}": x.dtype}
            fits = f"x{i}.shape == s{i} and x{i}.dtype is d{i} and x{i}.{here} and x{i}.is_contiguous()"
            lines += [f"x{i} = {source}", f"if not ({fits}): x{i} = fit(x{i}, s{i}, d{i}, {source!r})"]
        for g, ((dtype, shape), leaves) in enumerate(self.groups.items()):
            space[f"t{g}"] = torch.empty(len(leaves), rows, *shape, dtype=dtype, device=device)
            space[f"t{g}"] = space[f"t{g}"] if len(leaves) > 1 else space[f"t{g}"][0]
            parts = ", ".join(f"y{g}_{k}" for k in range(len(leaves)))
            lines += [f"y{g} = empty_like(t{g})", f"{parts} = y{g}" + (".unbind(0)" if len(leaves) > 1 else "")]
        given = [f"x{i}" for i in self.loaded] + [f"y{g}" for g in range(len(self.groups))]
        if device.type == "cpu":
            lines.append(f"kernel({', '.join([str(rows), *(f'{x}.data_ptr()' for x in given)])})")
        else:
            space["guard"] = torch.cuda.device(device)
            grid, block = (-(-rows // BLOCK), 1, 1), (BLOCK, 1, 1)
            lines.append(f"with guard: kernel({grid}, {block}, [{', '.join([str(rows), *given])}])")
        exec("\n    ".join([*lines, f"return {self.tree}"]), space)
        call: Callable[..., tuple[Any, Outcome]] = space["call"]
        return call

    def check(self, kernel: Any, device: torch.device) -> None:
        """Run the kernel on the rows of the trace: nearly all must agree with the result of the operations."""
        self.clone.device, before = device, self.clone.device
        got = self.bind(kernel, self.clone)(*self.example)
        self.clone.device = before
        for x, y in zip(tree_leaves(self.result), tree_leaves(got), strict=True):
            alike = torch.isclose(x.double(), y.cpu().double(), rtol=1e-3, atol=1e-4, equal_nan=True).reshape(ROWS, -1).all(1)
            if float(alike.double().mean()) < 0.98:  # not all: a distance may be rounded to either side of a threshold
                raise CannotFuse("its rows depend on each other, or the kernel is wrong: its result is not that of the step")


MAY_DIFFER = {"rows", "_tick", "_in_step", "_lockstep"}  # numbers that differ between worlds of one config


def attributes(world: World) -> dict[str, Any]:
    """The attributes of a world, to be compared: numbers; and of tensors the identity and the number of writes."""
    plain = {k: v for k, v in vars(world).items() if isinstance(v, bool | int | float | str)}
    tensors = {k: (id(v), v._version) for k, v in vars(world).items() if isinstance(v, Tensor)}
    return {**plain, **tensors}


def refuse_changed(clone: World, world: World) -> None:
    """Refuse a world with an attribute that was changed after it was made: the kernel would have the clone's value."""
    for name, mine in vars(clone).items():
        yours = vars(world).get(name)
        number = isinstance(mine, bool | int | float | str) and name not in MAY_DIFFER and mine != yours
        other = False
        if isinstance(mine, Tensor) and isinstance(yours, Tensor) and mine.dim() > 0 and mine.shape == yours.shape:
            other = not torch.allclose(mine.double(), yours.cpu().double(), 1e-4, 1e-5, equal_nan=True)  # devices round
        if number or other:
            raise CannotFuse(f"its attribute {name!r} is not as its config makes it")


def example(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A state after a few steps, actions and noise; the same in every call."""
    g = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(world.rows, *shape, generator=g, dtype=world.dtype)

    def draw_actions() -> dict[str, Tensor]:
        actions = {}
        for group in world.spec.groups:
            x, space = uniform(group.n, *group.action.shape), group.action
            if isinstance(space, Box):
                low, high = world.tensor(space.low), world.tensor(space.high)
                actions[group.name] = low + x * (high - low)
            else:
                actions[group.name] = (x * world.tensor(space.sizes if space.shape else space.sizes[0])).long()
        return actions

    world.reset(uniform(world.noise))
    state = world.state
    for _ in range(3):
        state, _ = world._transition("any", state, draw_actions(), uniform(world.noise))
    state = {k: v.clone(memory_format=torch.contiguous_format) for k, v in state.items()}
    if world.spec.horizon:
        state["clock"] = (uniform() * world.spec.horizon).long()  # in some rows the episode is about to end
    return state, draw_actions(), uniform(world.noise)


# --- compilers --------------------------------------------------------------------------------------------------------


def compile_c(text: str) -> Any:
    """The kernel as a function of C."""
    step = library(text, FLAGS).step
    step.restype, step.argtypes = None, [ctypes.c_longlong] + [ctypes.c_void_p] * text.count("*__restrict__")
    return step


@cache
def compile_cuda(text: str, device: torch.device) -> Any:
    """The kernel as a function of CUDA, compiled by NVRTC."""
    make = getattr(torch.cuda, "_compile_kernel", None)  # NVRTC: no compiler is needed on the machine
    if make is None:
        raise CannotFuse(f"PyTorch {torch.__version__} does not compile kernels, newer ones do")
    return make(text, "step", nvcc_options=["-fmad=false"])


def compiled(world: World, phase: Phase) -> Callable[..., tuple[Any, Outcome]]:
    """The step of a world in one phase, as a function that runs a kernel that was checked."""
    try:
        with torch.no_grad(), torch.cuda.device(world.device) if world.device.type == "cuda" else nullcontext():
            program = Program(world, phase)
            text = program.write(world.device.type)
            if Program(world, phase).write(world.device.type) != text:
                raise CannotFuse("its step depends on something that is neither in its state nor passed in")
            kernel = compile_c(text) if world.device.type == "cpu" else compile_cuda(text, world.device)
            program.check(kernel, world.device)
    except CannotFuse:
        raise
    except Exception as e:  # a world may raise anything; then it is not fused, and its step stays as it was
        raise CannotFuse(f"tracing its step failed, {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    return program.bind(kernel, world)


def fuse(world: World) -> str | None:
    """Make one kernel of the step, as the docstring of this file says. None when done; otherwise a sentence that says why not,
    and the world has not changed."""
    try:
        if world.device.type not in emit.TEXT:
            raise CannotFuse(f"there is no compiler for {world.device.type}, only for {' and '.join(emit.TEXT)}")
        calls = {phase: compiled(world, phase) for phase in world.phases}
    except CannotFuse as why:
        return f"{type(world).__name__} cannot be fused: {why}."

    def do(phase: Phase, state: State, actions: dict[str, Tensor], noise: Tensor) -> tuple[State, Outcome]:
        if phase not in calls:  # rows are no longer at the same time of their episodes
            try:
                calls[phase] = compiled(world, phase)
            except CannotFuse:
                calls[phase] = partial(world._transition, phase)
        return calls[phase](state, actions, noise)

    world._do = do
    return None
