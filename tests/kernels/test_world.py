"""A fused step gives what the operations give, and what cannot be fused says why and goes on as it was."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.envs.base import Move, State, World
from shoal.envs.mpe.simple_spread import SimpleSpread
from shoal.envs.mpe.simple_tag import SimpleTag
from shoal.envs.probe.probe_terminated import ProbeTerminated
from shoal.ids import catalog
from shoal.kernels import emit
from shoal.kernels import world as fused_world
from shoal.kernels.compiler import compiler
from shoal.kernels.world import FLAGS, Program, compile_c
from shoal.spec import Box, Discrete, EnvSpec, Frame, Group, Result
from shoal.tree import tree_leaves, tree_map

pytestmark = pytest.mark.compiler
ROWS = 7
NATIVE = [name for name, entry in catalog("envs").items() if entry.family in ("mpe", "probe")]
TOO_LARGE = {"collect_treasure"}  # everybody sorted by everybody's distance
KINDS = ("discrete", "multi", "continuous")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels of these tests are kept apart."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def draw(world: World, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Uniform actions and noise."""
    actions = {}
    for group in world.spec.groups:
        space = group.action
        x = torch.rand(world.rows, group.n, *space.shape, generator=g)
        if isinstance(space, Box):
            actions[group.name] = torch.tensor(space.low) + x * (torch.tensor(space.high) - torch.tensor(space.low))
        else:
            actions[group.name] = (x * torch.tensor(space.sizes if space.shape else space.sizes[0])).long()
    return actions, torch.rand(world.rows, world.noise, generator=g)


def assert_alike(got: Any, want: Any, tolerance: float) -> None:
    assert type(got) is type(want)
    a, b = tree_leaves(got), tree_leaves(want)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance if y.is_floating_point() else 0)


def play(plain: World, fused: World, steps: int, g: torch.Generator, resync: bool = False) -> int:
    """Step both alike, compare all, and count the rows that were over."""
    tolerance, ended = (1e-12 if plain.dtype == torch.float64 else 1e-5), 0
    for _ in range(steps):
        actions, noise = draw(plain, g)
        want, got = plain.step(actions, noise), fused.step(actions, noise)
        assert_alike(got, want, tolerance)
        assert (got.next is got.frame) == (want.next is want.frame)
        assert fused.state.keys() == plain.state.keys()
        assert_alike(fused.state, plain.state, tolerance)
        assert all(x.is_contiguous() for x in tree_leaves(got))
        if resync:  # or roundings would grow from step to step
            fused.state = {k: v.clone() for k, v in plain.state.items()}
        ended += int(want.over.sum())
    return ended


def pair(cls: type[World], config: Any = None, dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[World, World]:
    """The same world twice, the second fused."""
    plain, fused = cls(config, rows, "cpu", dtype), cls(config, rows, "cpu", dtype)
    noise = torch.rand(rows, plain.noise, generator=generator())
    plain.reset(noise)
    fused.reset(noise)
    assert fused.fuse() is None
    assert fused._do != fused._transition
    return plain, fused


def configs(cls: type[World]) -> list[Any]:
    """The usual config, with every kind of action and of observation it has."""
    plain = cls.Config()
    if hasattr(plain, "vector"):  # pictures, and pictures beside numbers
        return [plain, replace(plain, vector=True, n=2)]
    names = [k for k in ("actions", "pair", "lone") if hasattr(plain, k)]
    kinds = [k for k in KINDS if cls.__name__ != "ProbeIllegal" or k != "continuous"]
    return [replace(plain, **dict.fromkeys(names, kind)) for kind in kinds] if names else [plain]


COSTLY = {"simple_world_comm", "simple_line", "simple_formation"}  # to compile


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in COSTLY else []) for x in sorted(set(NATIVE) - TOO_LARGE)]
)
def test_a_fused_step_is_the_step(name: str) -> None:
    cls = catalog("envs")[name].load()
    for config in configs(cls):
        plain, fused = pair(cls, config)
        assert play(plain, fused, 60, generator()) >= 2 * ROWS
        plain, fused = pair(cls, config, torch.float32)
        assert play(plain, fused, 60, generator(), resync=True) >= 2 * ROWS


def test_every_native_world_is_in_one_list_or_the_other() -> None:
    assert len(NATIVE) == 26
    for name in TOO_LARGE:
        world = catalog("envs")[name].load()(rows=ROWS)
        assert "too large for one kernel" in str(world.fuse())
        assert world._do == world._transition


@pytest.mark.parametrize(
    "config",
    [
        SimpleSpread.Config(n=5, agent_neighbors=2, landmark_neighbors=7),
        SimpleSpread.Config(rules="openai"),
        SimpleSpread.Config(terminate_on_success=True, max_cycles=9),
        SimpleTag.Config(agent_neighbors=2, landmark_neighbors=1, num_good=2),
        SimpleTag.Config(terminate_on_success=True, num_obstacles=0, num_adversaries=2, max_cycles=9),
        ProbeTerminated.Config(stagger=True),
    ],
)
def test_settings_that_change_the_step(config: Any) -> None:
    cls = next(c for c in (SimpleSpread, SimpleTag, ProbeTerminated) if c.Config is type(config))
    plain, fused = pair(cls, config)
    assert plain.fixed_length == (not getattr(config, "terminate_on_success", False) and cls is not ProbeTerminated)
    assert play(plain, fused, 60, generator()) >= 2 * ROWS


def test_rows_that_fall_out_of_step() -> None:
    plain, fused = pair(SimpleSpread)
    state = plain.get_state()
    state["clock"] = torch.arange(ROWS) * 3
    for world in (plain, fused):
        world.set_state(state)
        assert not world._in_step
    assert play(plain, fused, 30, generator()) >= ROWS


def test_a_stage_that_changes_takes_effect() -> None:
    plain, fused = pair(SimpleTag, SimpleTag.Config(curriculum=True, max_cycles=4))
    g = generator()
    for stage in (0, 1, 2):
        for world in (plain, fused):
            world.stage.fill_(stage)  # type: ignore[attr-defined]
        assert play(plain, fused, 8, g) == 2 * ROWS
        assert fused.state["pace"].tolist() == [(0.5, 0.75, 1.0)[stage]] * ROWS
    plain, fused = pair(SimpleSpread, SimpleSpread.Config(curriculum=True))
    for world in (plain, fused):
        world.stage = torch.ones((), dtype=torch.long)  # type: ignore[attr-defined]
        world.state["pos"] *= 0.1  # near enough to touch
    actions, noise = draw(plain, g)
    want, got = plain.step(actions, noise), fused.step(actions, noise)
    assert float(want.stats["collisions"].sum()) > 0
    assert_alike(got, want, 1e-12)


def test_inputs_may_be_slices_of_other_tensors() -> None:
    plain, fused = pair(SimpleSpread, SimpleSpread.Config(max_cycles=2), torch.float32)
    for _ in range(4):
        actions, noise = draw(plain, generator())
        want = plain.step(actions, noise)
        wide, deep = torch.stack((noise, -noise), -1), actions["agents"].t().contiguous()
        assert not wide[..., 0].is_contiguous()
        assert_alike(fused.step({"agents": deep.t()}, wide[..., 0]), want, 1e-5)
    with pytest.raises(ValueError, match=r"actions\['agents'\] has the shape \(7, 2\), and should have \(7, 3\)"):
        fused.step({"agents": actions["agents"][:, :2]}, noise)


def test_what_is_new_and_what_is_shared() -> None:
    _, fused = pair(SimpleSpread)
    actions, noise = draw(fused, generator())
    before = {k: v.clone() for k, v in fused.state.items()}
    first, held = fused.step(actions, noise), fused.state
    kept = tree_map(torch.clone, (first, held))
    second = fused.step(actions, noise)
    assert_alike((first, held), kept, 0.0)  # the second wrote elsewhere
    assert first.over is second.over  # a constant
    assert first.frame["agents"].alive is first.frame["agents"].active
    assert first.stats["success"].data_ptr() != second.stats["success"].data_ptr()
    assert not torch.equal(before["vel"], held["vel"])
    for _ in range(23):
        last = fused.step(actions, noise)
    assert last.over.all()
    parts = {k: v.untyped_storage().data_ptr() + v.storage_offset() * v.element_size() for k, v in fused.state.items()}
    assert len(set(parts.values())) == len(parts)
    vel = fused.state["vel"]
    assert not vel.any()
    vel.fill_(3.0)  # the owner of a state may write to it: the next episode begins at rest all the same
    for _ in range(25):
        fused.step(actions, noise)
    assert not fused.state["vel"].any()


class Toy(World):
    """`rule(x)` says what a row's number becomes."""

    fixed_length = True
    noise_begin = 2

    def setup(self) -> None:
        self.table = self.tensor([1.0, 2.0])
        group = Group("agents", "agents", ("agent_0", "agent_1"), (1,), Discrete(2))
        self.spec = EnvSpec((group,), horizon=5)

    def begin(self, noise: Tensor) -> State:
        return {"x": noise * 8 - 4}

    def rule(self, x: Tensor, a: Tensor) -> Tensor:
        return x + a

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        x = self.rule(state["x"], actions["agents"]).to(self.dtype)
        return Move({"x": x}, {"agents": Result(x, self.never(2))})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(state["x"][..., None], state["clock"])})


def toy(rule: Any) -> type[Toy]:
    return type("Mine", (Toy,), {"rule": lambda self, x, a: rule(self, x, a)})


def into_slot(self: Toy, x: Tensor, a: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1] = x[:, 0]
    y[:, :1].add_(x[:, 1:]).mul_(2)
    return y.clamp_(-3, 3)


RULES: dict[str, Any] = {
    "floor division": lambda self, x, a: x.long() // 3 + x.long() % 3 * 10 + x.long() % -3 + a // -2,
    "truncated division": lambda self, x, a: torch.div(x.long(), 3, rounding_mode="trunc"),
    "sorted": lambda self, x, a: torch.stack((x, -x, x * 2), -1).sort(-1, descending=True).values[..., 1],
    "equals keep their order": lambda self, x, a: torch.stack((a, a * 0, a), -1).argsort(dim=-1, stable=True)[..., 1],
    "the first of equals": lambda self, x, a: torch.stack((a, a, x.long()), -1).argmax(-1),
    "two indices": lambda self, x, a: self.table[a] + torch.eye(2)[a[:, 0], a[:, 1]][:, None],
    "a list of indices": lambda self, x, a: x[:, [1, 0]] + x[:, None, [1, 0]].sum(1),
    "padded": lambda self, x, a: (
        torch.nn.functional.pad(x[:, :1], (1, 2), value=3.0)[:, 1:3].cumsum(1).prod(1, keepdim=True) + x
    ),
    "written in place": into_slot,
    "not a number": lambda self, x, a: (
        (x.sqrt().clamp(max=1.0) + torch.minimum(x.log(), x)).amin(1, keepdim=True).expand(-1, 2)
    ),
    "logic": lambda self, x, a: (x > 0).logical_and(a).logical_or(~(x < 1)).logical_not(),
    "signed zero": lambda self, x, a: 1 / (x * 0 + 0.0) + 1 / (x.abs() * -0.0),
    "matrices": lambda self, x, a: (
        (torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to(x) @ x[..., None])[..., 0] - x @ torch.eye(2).to(x)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_operations(name: str) -> None:
    plain, fused = pair(toy(RULES[name]), rows=40)
    g = generator()
    for _ in range(6):
        actions, noise = draw(plain, g)
        want, got = plain.step(actions, noise), fused.step(actions, noise)
        for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda self, x, a: torch.fft.fft(x).real, "the operation _fft_r2c is not known to the compiler"),
        (lambda self, x, a: x**2.5, "the operation pow, to the power of 2.5, is not known"),
        (lambda self, x, a: x if x.sum() > 0 else -x, "its rows depend on each other"),
        (lambda self, x, a: x if bool(self.table[0] > 0) else -x, "the operation _local_scalar_dense is not known"),
        (lambda self, x, a: x - x.mean(0), "its rows depend on each other: an operation goes along them"),
        (lambda self, x, a: x.sort(0).values, "its rows depend on each other: an operation goes along them"),
        (lambda self, x, a: x + x[:1], "its rows depend on each other: an operation goes along them"),
        (lambda self, x, a: (x[:, None, 0] - x[None, :, 0]).amax(1)[:, None].expand(-1, 2), "its rows depend on each other"),
        (lambda self, x, a: x + torch.arange(self.rows)[:, None], "a constant is not the same for all of them"),
        (lambda self, x, a: x.t().reshape(self.rows, 2), "its rows depend on each other, or the kernel is wrong"),
        (lambda self, x, a: x + self.table.add_(1), "it writes to a tensor of its own"),
        (lambda self, x, a: x[0].expand(self.rows, 2), "its rows depend on each other"),
        (lambda self, x, a: sum((x.sin() * k for k in range(7000)), x), "too large for one kernel"),
    ],
)
def test_what_cannot_be_fused_says_why(rule: Any, why: str) -> None:
    world = toy(rule)(rows=4)
    said = str(world.fuse())
    assert said.startswith("Mine cannot be fused: ")
    assert why in said
    assert said.endswith(".")
    assert "\n" not in said
    assert world._do == world._transition


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler.cache_clear()
    world = Toy(rows=4)
    assert world.fuse() == "Toy cannot be fused: there is no C compiler: install cc, gcc or clang, or name one in $CC."
    assert world._do == world._transition
    compiler.cache_clear()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused_world, "FLAGS", ("-no-such-flag",))
    assert "failed: " in str(Toy(rows=4).fuse())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emit.C, "add", "{0} - {1}")
    assert "its result is not that of the step" in str(Toy(rows=4).fuse())


def test_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Toy(rows=4).fuse() is None
    files = sorted((tmp_path / "shoal" / "kernels").iterdir())
    assert [p.suffix for p in files] == [".so", ".so"]  # the middle and the last

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled again")

    compiler()
    monkeypatch.setattr(subprocess, "run", never)
    assert Toy(rows=9).fuse() is None  # of any number of rows
    assert sorted((tmp_path / "shoal" / "kernels").iterdir()) == files


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:-100] + bytes(100)])
def test_a_damaged_kernel_is_made_anew(damage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Toy(rows=4).fuse() is None
    for path in (tmp_path / "shoal" / "kernels").iterdir():
        whole = path.read_bytes()
        path.unlink()  # the loaded one stays as it is
        path.write_bytes(damage(whole))
    assert Toy(rows=4).fuse() is None
    assert {p.read_bytes()[:4] for p in (tmp_path / "shoal" / "kernels").iterdir()} == {b"\x7fELF"}


def test_what_was_set_on_a_world_since_it_was_made_is_not_forgotten() -> None:
    world = SimpleSpread(rows=4)
    world.gain = world.gain * 2
    assert world.fuse() == "SimpleSpread cannot be fused: its attribute 'gain' is not as its config makes it."
    world = SimpleSpread(rows=4)
    world.colour = 3.0  # type: ignore[attr-defined]
    assert world.fuse() is None  # nothing that a step asks for


class Counting(SimpleSpread):
    def rewards(self, w: State) -> Any:
        self.count = getattr(self, "count", 0) + 1
        reward, stats = super().rewards(w)
        return reward + self.count, stats


class Chancy(SimpleSpread):
    def rewards(self, w: State) -> Any:
        reward, stats = super().rewards(w)
        return reward + random.random(), stats


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Counting, "its step changes 'count', which is not in its state"), (Chancy, "neither in its state nor passed in")],
)
def test_worlds_with_a_life_of_their_own_are_not_fused(cls: type[World], why: str) -> None:
    said = cls(rows=4).fuse()
    assert said is not None
    assert why in said


def test_numbers_that_are_no_actions() -> None:
    _, fused = pair(SimpleSpread)
    with pytest.raises(ValueError, match=r"should be torch\.int64"):
        fused.step({"agents": torch.full((ROWS, 3), 1.9)}, torch.rand(ROWS, fused.noise, generator=generator()))


STAND_IN = """#include <cmath>
#define __global__
struct {{ long long x; }} blockIdx, blockDim, threadIdx;
{text}
extern "C" void run(int rows, {pointers}) {{
    blockDim.x = 64;
    for (blockIdx.x = 0; blockIdx.x <= rows / 64; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++) step(rows, {names});
}}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA's text is C++, and there is no g++")
def test_the_text_for_cuda_run_a_thread_at_a_time(tmp_path: Path) -> None:
    """CUDA's text, compiled by a C++ compiler with stand-ins for the grid, gives what C's gives, bit for bit."""
    for name in ("simple_spread", "simple_crypto", "simple_line", "probe_turns", "probe_image"):
        for phase in ("middle", "last", "any"):
            world = catalog("envs")[name].load()(rows=4)
            program = Program(world, phase)  # type: ignore[arg-type]
            text = program.write("cuda")
            pointers = text.partition("rows_here, ")[2].partition(") {")[0]
            names = ", ".join(p.rpartition(" ")[2].strip("*") for p in pointers.split(", "))
            source = tmp_path / f"{name}_{phase}.cpp"
            source.write_text(STAND_IN.format(text=text, pointers=pointers, names=names))
            made = source.with_suffix(".so")
            subprocess.run(["g++", str(source), "-o", str(made), "-Wl,-Bsymbolic", *FLAGS], check=True)  # libc has a `step`
            kernel = ctypes.CDLL(str(made)).run
            kernel.restype, kernel.argtypes = None, [ctypes.c_int] + [ctypes.c_void_p] * len(names.split(","))
            got, wanted = (program.bind(k, program.clone)(*program.example) for k in (kernel, compile_c(program.write("cpu"))))
            for x, y in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
                assert torch.equal(x, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["simple_spread", "simple_formation", "probe_turns", "probe_image"])
def test_on_cuda(name: str) -> None:
    plain, fused = (catalog("envs")[name].load()(rows=200, device="cuda", dtype=torch.float64) for _ in range(2))
    noise = torch.rand(200, plain.noise, generator=generator()).cuda()
    plain.reset(noise), fused.reset(noise)
    assert fused.fuse() is None
    for _ in range(30):
        actions = {k: v.cuda() for k, v in draw(plain, generator())[0].items()}
        a, b = plain.step(actions, noise), fused.step(actions, noise)
        for x, y in zip(tree_leaves((a, plain.state)), tree_leaves((b, fused.state)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
