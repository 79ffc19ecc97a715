"""Every line in its room: what may be imported, called and reckoned where. `violations(root)` reads any tree of this shape,
and the second half of this file plants each violation in one to see it found, and its lawful neighbours left alone."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "shoal"

LEVELS = {
    **dict.fromkeys(("spec", "frames", "tree", "ids", "flags", "files", "ops", "kernels"), 0),
    **dict.fromkeys(("nets", "envs", "buffers"), 1),
    "algos": 2,
    **dict.fromkeys(("log", "training"), 3),
    **dict.fromkeys(("tools", "zoo", "web", "policy"), 4),
    **dict.fromkeys(("cli", "api", "__main__"), 5),
}
ATTICS = {"utils", "util", "common", "misc", "helpers", "helper"}
FOREIGN_WORLDS = {"mpe2", "gymnasium", "pettingzoo", "gym", "vmas", "envpool", "mamujoco", "lbforaging", "rware"}
HOSTS = {
    f"envs/{name}.py" for name in (*FOREIGN_WORLDS, "rows", "workers", "vector", "football", "own")
}  # rows are stepped there
HOMES = {  # library -> the files, or the folder, where it may be imported
    "wandb": ("log/wandb.py",),
    "triton": ("kernels/triton.py",),
    "tensorboard": ("log/tensorboard.py",),
    "rich": ("log/console.py", "cli.py"),
    **dict.fromkeys(("matplotlib", "imageio", "imageio_ffmpeg"), ("tools/",)),
    "PIL": ("tools/", "envs/pixels.py"),
    **{name: ("tools/bench.py", f"envs/{name}.py") for name in FOREIGN_WORLDS},
    "pettingzoo": ("tools/bench.py", "tools/rawcheck.py", "envs/pettingzoo.py"),
    "gymnasium": ("tools/", "envs/gymnasium.py", "envs/football.py", "envs/pettingzoo.py"),
    "gymnasium_robotics": ("envs/mamujoco.py",),
    "gfootball": ("envs/football.py",),
}
KERNELS = {"kernels", "ops", "training"}  # rooms that may import shoal.kernels; others go through ops/kernels.py
NUMBERS = {"kernels/scalars.py", "kernels/trace.py"}  # constants of a world become literals there
EVERYWHERE = {"torch", "numpy"}
GAMMA = re.compile(r"_*(gamma|discount)(s|_\w+)?")
RECKONING = {"mul", "mul_", "pow", "pow_", "add", "add_", "sub", "sub_", "div", "div_", "addcmul", "addcmul_", "lerp", "prod"}
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like", "randn_like"}
DRAWS_IN_PLACE = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
SEEDS_FOR_A_WHILE = dict.fromkeys(
    ("nets/own.py", "training/seeds.py", "envs/vmas.py"), ("torch.random.fork_rng", "torch.manual_seed")
)  # and back
DRAWS_INSIDE = {"dropout", "gumbel_softmax", "rrelu", "alpha_dropout"}  # functions that draw from the global generator


def violations(root: Path) -> list[str]:
    """Every line that is in the wrong room: 'path:line: rule: what'."""
    found = []
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        for part in (*where.parts[:-1], where.stem):
            if part in ATTICS:
                found.append(f"{where}:1: attic: rooms have nouns, and {part!r} is none")
        tree = ast.parse(path.read_text())
        found += [f"{where}:{line}: {rule}: {what}" for line, rule, what in _lines(where, tree)]
    return found


def _lines(where: Path, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    name, room = where.as_posix(), where.parts[0]
    imports = [(node, module) for node in ast.walk(tree) for module in _imported(node, where)]
    for node, module in imports:
        yield from _import(node, module, name)
    steps_foreign = any(module.partition(".")[0] in FOREIGN_WORLDS for _, module in imports) or name in HOSTS
    lawful = _seeds_for_a_while(tree, SEEDS_FOR_A_WHILE.get(name, ()))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            called, receiver = _called(node)
            descends = called == "backward" or (called == "grad" and receiver == "autograd")
            if descends and receiver and name != "algos/optimiser.py":
                yield line, "backward", "only algos/optimiser.py descends"
            if called == "step" and receiver and name != "training/collect.py" and not steps_foreign:
                inherited = room == "envs" and receiver == "super"
                inherited |= name == "envs/regroup.py" and receiver == "inner"  # the same world, behind a front
                remembers = room == "nets" and receiver == "memory"  # a step of nets/memory.py
                schedules = name == "ops/schedules.py"  # PyTorch's schedulers
                if not inherited and not remembers and not schedules:
                    yield line, "step", "only training/collect.py steps a world"
            if called in ("send", "receive") and receiver == "env" and name != "training/halves.py":
                yield line, "step", "only training/halves.py steps halves of a world"
            if (
                called == "item"
                and receiver
                and not node.args
                and room in ("algos", "ops", "kernels", "nets", "buffers", "envs")
            ):
                yield line, "item", "the logger makes numbers"
            tensors_alone = room in ("algos", "ops", "kernels", "nets", "buffers") and name not in NUMBERS
            if called in ("tolist", "numpy") and receiver and tensors_alone:
                yield line, "item", "the logger makes numbers"
            if called in RECKONING and any(_is_gamma(x) for x in (*node.args, *_receiver_of(node))) and not _may_discount(name):
                yield line, "gamma", "arithmetic in gamma belongs to ops/returns.py"
            if _draws_globally(node, called, receiver):
                yield line, "random", "draw from a generator that was passed in"
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            if node.attr == "step" and _last(node.value) in ("env", "world", "environment", "eval_env"):
                called_here = any(isinstance(c, ast.Call) and c.func is node for c in ast.walk(tree))
                if not called_here and name != "training/collect.py" and not steps_foreign:
                    yield line, "step", "only training/collect.py steps a world"
            if dotted == "torch.distributed" and name != "training/distributed.py":
                yield line, "distributed", "only training/distributed.py speaks to other machines"
            if dotted in ("np.random", "numpy.random", "torch.random") and id(node) not in lawful:
                yield line, "random", f"{dotted} is one generator for everybody"
            seeds = dotted in ("torch.manual_seed", "torch.seed") or re.fullmatch(
                r"torch\.(cuda|mps|xpu)\.(manual_)?seed(_all)?", dotted
            )
            if seeds and id(node) not in lawful:
                yield line, "random", f"{dotted} seeds one generator for everybody"
        if isinstance(node, ast.BinOp) and (_is_gamma(node.left) or _is_gamma(node.right)) and not _may_discount(name):
            yield line, "gamma", "arithmetic in gamma belongs to ops/returns.py"
        if isinstance(node, ast.AugAssign) and (_is_gamma(node.target) or _is_gamma(node.value)) and not _may_discount(name):
            yield line, "gamma", "arithmetic in gamma belongs to ops/returns.py"


def _seeds_for_a_while(tree: ast.Module, names: tuple[str, ...]) -> set[int]:
    """The nodes of a `with` over the first of `names` that speak of them: inside, and in its head, alone."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if names and isinstance(node, ast.With) and any(_forks(item.context_expr, names[0]) for item in node.items):
            whole = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and _dotted(x) in names]
            found |= {id(part) for x in whole for part in ast.walk(x)}
    return found


def _forks(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) == name


def _may_discount(name: str) -> bool:
    return name in ("ops/returns.py", "kernels/triton.py") or name.startswith(
        "envs/probe/"
    )  # the probes' answers must not depend on returns.py


def _imported(node: ast.AST, where: Path) -> list[str]:
    """The modules that a node imports, by their whole names."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = ("shoal", *where.parts[:-1])
            base = ".".join((*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])))
        return [f"{base}.{a.name}" for a in node.names]
    if isinstance(node, ast.Call) and _called(node)[0] in ("import_module", "__import__") and node.args:
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _import(node: ast.AST, module: str, name: str) -> Iterator[tuple[int, str, str]]:
    line, top = getattr(node, "lineno", 0), module.partition(".")[0]
    if top == "shoal":
        room = [*module.split("."), ""][1]
        mine = name.partition("/")[0].removesuffix(".py")
        if room in LEVELS and mine in LEVELS and LEVELS[room] > LEVELS[mine]:
            yield line, "direction", f"{mine} may not look up to {room}"
        if room == "kernels" and mine not in KERNELS:
            yield line, "kernels", f"{mine} reaches kernels through ops/kernels.py"
        if mine not in LEVELS and mine != "__init__":
            yield line, "direction", f"there is no room {mine}"
        return
    if module.startswith("torch.distributed") and name != "training/distributed.py":
        yield line, "distributed", "only training/distributed.py speaks to other machines"
    if module.startswith("torch.utils.tensorboard"):
        top = "tensorboard"
    if top == "random" or module.startswith(("numpy.random", "torch.random")) or module == "torch.manual_seed":
        yield line, "random", f"{module} is one generator for everybody"
    if top in EVERYWHERE or top in sys.stdlib_module_names:
        return
    homes = HOMES.get(top, (f"{top}.py", f"on_{top}.py"))
    at_home = any(name == h or name.startswith(h if h.endswith("/") else "\0") for h in homes)
    if not at_home and (top in HOMES or name.rpartition("/")[2] not in homes):
        yield line, "library", f"{top} may be imported in {' and '.join(homes)} alone"


def _called(node: ast.Call) -> tuple[str, str]:
    """The name that is called, and the last name of what it is called on."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, _last(node.func.value) or "?"
    return (node.func.id, "") if isinstance(node.func, ast.Name) else ("", "")


def _receiver_of(node: ast.Call) -> list[ast.expr]:
    return [node.func.value] if isinstance(node.func, ast.Attribute) else []


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_gamma(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_gamma(node.operand)
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return _is_gamma(node.value) or (isinstance(key, str) and bool(GAMMA.fullmatch(key)))
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return bool(GAMMA.fullmatch(name))


def _draws_globally(node: ast.Call, called: str, receiver: str) -> bool:
    given = {k.arg for k in node.keywords}
    if None in given or "generator" in given:
        return False
    if called in DRAWS_IN_PLACE and receiver:
        return True
    if called in DRAWS_INSIDE and receiver in ("functional", "F", "nn"):
        return True
    return called in DRAWS and receiver == "torch"


def test_every_line_is_in_its_room() -> None:
    assert ROOT.is_dir()
    assert len(list(ROOT.rglob("*.py"))) > 30
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


# --- the guard itself: each violation planted, each neighbour that is lawful --------------------------------------------

PLANTED = [
    ("algos/ppo.py", "loss.backward()", "backward"),
    ("training/loop.py", "(loss / count).backward()", "backward"),
    ("ops/losses.py", "torch.autograd.backward(loss)", "backward"),
    ("algos/ppo.py", "torch.autograd.grad(loss, params)", "backward"),
    ("training/evaluate.py", "outcome = env.step(actions, noise)", "step"),
    ("training/loop.py", "self.env.step(actions)", "step"),
    ("algos/ppo.py", "self.optimiser.step()", "step"),
    ("algos/base.py", "self.env.step(actions)", "step"),
    ("tools/watch.py", "self.worlds[0].step(a)", "step"),
    ("training/speedup.py", "f = torch.compile(env.step)", "step"),
    ("envs/mpe/simple.py", "inner.step(a)", "step"),
    ("nets/heads.py", "self.env.step(a)", "step"),
    ("training/loop.py", "self.memory.step(a)", "step"),
    ("algos/ppo.py", "y = r + gamma * v", "gamma"),
    ("algos/ppo.py", "y = r + c.gamma * v", "gamma"),
    ("buffers/replay.py", "x = 1 - self.config.discount", "gamma"),
    ("training/collect.py", "ret *= gamma", "gamma"),
    ("training/collect.py", "gamma **= n", "gamma"),
    ("algos/dqn.py", "y = v * -gamma", "gamma"),
    ("algos/dqn.py", "y = v * config['gamma']", "gamma"),
    ("algos/dqn.py", "y = v.mul(c.gamma)", "gamma"),
    ("algos/dqn.py", "y = gamma_n * v", "gamma"),
    ("envs/mpe/world.py", "y = gamma * v", "gamma"),
    ("kernels/native.py", "y = gamma * v", "gamma"),
    ("training/loop.py", "import torch.distributed as dist", "distributed"),
    ("training/loop.py", "from torch import distributed", "distributed"),
    ("algos/base.py", "torch.distributed.all_reduce(x)", "distributed"),
    ("training/loop.py", "import wandb", "library"),
    ("log/logger.py", "from wandb import init", "library"),
    ("log/logger.py", "from torch.utils.tensorboard import SummaryWriter", "library"),
    ("log/logger.py", "from tensorboard.backend import x", "library"),
    ("log/report.py", "from rich.table import Table", "library"),
    ("tools/plot.py", "from rich.table import Table", "library"),
    ("training/loop.py", "import matplotlib.pyplot as plt", "library"),
    ("envs/base.py", "from PIL import Image", "library"),
    ("api.py", "import imageio.v2", "library"),
    ("envs/vector.py", "import gymnasium", "library"),
    ("envs/mpe/world.py", "import mpe2", "library"),
    ("tools/plot.py", "import pettingzoo", "library"),
    ("envs/gymnasium.py", "import pettingzoo", "library"),
    ("training/loop.py", "importlib.import_module('mpe2.all_modules')", "library"),
    ("training/loop.py", "import scipy.stats", "library"),
    ("training/loop.py", "import ray", "library"),
    ("ops/kernels.py", "import triton", "library"),
    ("kernels/native.py", "import triton.language as tl", "library"),
    ("algos/ppo.py", "x = loss.item()", "item"),
    ("ops/losses.py", "x = loss.mean().item()", "item"),
    ("nets/norm.py", "x = self.count.item()", "item"),
    ("envs/mpe/world.py", "x = over.any().item()", "item"),
    ("algos/ppo.py", "x = loss.tolist()", "item"),
    ("nets/norm.py", "x = loss.cpu().numpy()", "item"),
    ("buffers/replay.py", "x = self.count.tolist()", "item"),
    ("kernels/recording.py", "x = loss.item()", "item"),
    ("kernels/trace.py", "x = loss.item()", "item"),
    ("kernels/native.py", "x = loss.tolist()", "item"),
    ("ops/losses.py", "from shoal.nets.layers import MLP", "direction"),
    ("spec.py", "from shoal.envs.base import World", "direction"),
    ("ids.py", "import shoal.algos.base", "direction"),
    ("flags.py", "from shoal.training.settings import Settings", "direction"),
    ("nets/heads.py", "from shoal.algos.base import Algorithm", "direction"),
    ("envs/base.py", "from shoal.training import seeds", "direction"),
    ("buffers/rollout.py", "from ..algos.base import Algorithm", "direction"),
    ("algos/base.py", "from shoal.log.logger import Logger", "direction"),
    ("algos/ppo.py", "from shoal import training", "direction"),
    ("log/report.py", "from shoal.tools.plot import plot", "direction"),
    ("training/loop.py", "from shoal import api", "direction"),
    ("training/loop.py", "from shoal.tools import watch", "direction"),
    ("tools/plot.py", "from shoal import cli", "direction"),
    ("tools/plot.py", "from shoal.api import load", "direction"),
    ("attic/x.py", "from shoal.spec import Batch", "direction"),
    ("kernels/world.py", "from shoal.envs.base import World", "direction"),
    ("kernels/recording.py", "from shoal.training.offpolicy import OffPolicyTrainer", "direction"),
    ("kernels/native.py", "from shoal.nets.layers import MLP", "direction"),
    ("envs/base.py", "from shoal.kernels.world import fuse", "kernels"),
    ("envs/vector.py", "from shoal import kernels", "kernels"),
    ("nets/layers.py", "from shoal.kernels import native", "kernels"),
    ("algos/ppo.py", "import shoal.kernels.triton", "kernels"),
    ("buffers/replay.py", "from ..kernels import recording", "kernels"),
    ("tools/bench.py", "import importlib; importlib.import_module('shoal.kernels.graph')", "kernels"),
    ("policy.py", "from shoal.kernels.compiler import compiler", "kernels"),
    ("spec.py", "from shoal.kernels.compiler import CannotFuse", "kernels"),
    ("training/loop.py", "torch.manual_seed(0)", "random"),
    ("training/loop.py", "torch.cuda.manual_seed_all(0)", "random"),
    ("training/loop.py", "x = np.random.rand(3)", "random"),
    ("tools/plot.py", "rng = numpy.random.default_rng()", "random"),
    ("training/loop.py", "from numpy.random import rand", "random"),
    ("training/loop.py", "import random", "random"),
    ("training/loop.py", "from random import choice", "random"),
    ("envs/base.py", "x = torch.rand(3)", "random"),
    ("algos/ppo.py", "x = torch.randperm(n, device=d)", "random"),
    ("algos/ppo.py", "x = torch.randn_like(y)", "random"),
    ("nets/layers.py", "with torch.random.fork_rng(): torch.manual_seed(0)", "random"),
    ("algos/heads.py", "with torch.random.fork_rng(): torch.manual_seed(0)", "random"),
    ("nets/own.py", "torch.manual_seed(0)", "random"),  # for good
    ("nets/own.py", "state = torch.random.get_rng_state()", "random"),
    ("nets/own.py", "with torch.random.fork_rng(): x = torch.rand(3)", "random"),
    ("nets/own.py", "with torch.random.fork_rng(): x = torch.cuda.manual_seed_all(3)", "random"),
    ("nets/layers.py", "w.normal_(0, 1)", "random"),
    ("nets/layers.py", "x = nn.functional.dropout(x, 0.1)", "random"),
    ("utils.py", "x = 1", "attic"),
    ("training/helpers.py", "x = 1", "attic"),
    ("common/x.py", "x = 1", "attic"),
    ("envs/misc/x.py", "x = 1", "attic"),
]

LAWFUL = [
    ("algos/optimiser.py", "(loss / count).backward()"),
    ("algos/optimiser.py", "torch.autograd.grad(loss, params)"),
    ("algos/base.py", "from shoal.nets.layers import NetConfig\nfrom shoal.spec import Batch\nfrom shoal.ops import losses"),
    ("training/collect.py", "outcome = env.step(actions, noise)"),
    ("training/collect.py", "f = self.env.step"),
    ("training/loop.py", "self.step += 1\nloop.step // 2\nf(self.step, step=step)\nstep(3)"),
    ("envs/base.py", "class World:\n    def step(self, actions):\n        return self.state"),
    ("envs/mpe/world.py", "class Mine(World):\n    def step(self, actions):\n        return super().step(actions)"),
    ("envs/gymnasium.py", "import gymnasium\nenv.step(a)"),
    ("envs/pettingzoo.py", "import pettingzoo\nself.inner.step(a)"),
    ("envs/vector.py", "env.step(a)"),
    ("tools/bench.py", "import importlib\nm = importlib.import_module('mpe2.all_modules')\nworld.step(a)"),
    ("kernels/triton.py", "import triton\ntrace = gamma * lam\nfrom shoal.kernels import compiler"),
    ("kernels/trace.py", "cells = one.flatten().tolist()"),
    ("ops/kernels.py", "from shoal.kernels import native, triton"),
    ("training/speedup.py", "from shoal.kernels.recording import Recording"),
    ("envs/base.py", "from shoal.ops.kernels import fuse_world"),
    ("ops/returns.py", "delta = reward + gamma * value\ntrace = gamma * lam\ngamma **= 2"),
    ("envs/probe/base.py", "v = (1 - gamma**steps) / (1 - gamma)"),
    ("algos/ppo.py", "gamma: float = 0.99\nadvantage = gae(r, v, c.gamma, c.lam)\nif not 0 <= c.gamma <= 1:\n    pass"),
    ("algos/ppo.py", "x = 1 + gae(r, v, c.gamma)\ny = 'gamma' + name\nz = f(gamma=c.gamma) * 2"),
    ("training/distributed.py", "import torch.distributed as dist\ntorch.distributed.init()"),
    ("training/loop.py", "x = torch.distributions\nfrom shoal.ops import distributions"),
    ("log/wandb.py", "import wandb"),
    ("log/tensorboard.py", "from torch.utils.tensorboard import SummaryWriter"),
    ("log/console.py", "from rich.console import Console"),
    ("cli.py", "from rich.table import Table\nfrom shoal import api\nfrom shoal.tools import watch"),
    ("tools/watch.py", "from PIL import Image\nimport matplotlib\nimport imageio.v2 as imageio"),
    ("tools/onnxruntime.py", "import onnxruntime"),
    ("training/on_ray.py", "import ray"),
    ("log/logger.py", "whole = x.tolist()\nfrom shoal.log.wandb import WandB"),
    ("log/report.py", "from shoal.algos.base import Algorithm"),
    ("training/loop.py", "x = loss.item()\nfrom shoal.log import report\nimport shoal"),
    ("envs/mpe/simple.py", "x = places[row].tolist()\nfor k, v in d.items():\n    pass"),
    ("algos/ppo.py", "for k, v in d.items():\n    pass\nx = d.item(3)"),
    ("tools/plot.py", "from shoal.training.run import Run\nimport numpy as np\nimport json"),
    ("api.py", "from shoal.training.loop import Loop\nimport torch"),
    ("__init__.py", "import importlib\nimportlib.import_module('shoal.api')"),
    ("nets/own.py", "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(seed)\n    module = cls(3)"),
    ("nets/heads.py", "after = self.memory.step(x, state)"),
    ("training/seeds.py", "g = torch.Generator(device=device).manual_seed(seed)"),
    ("training/collect.py", "x = torch.rand(3, generator=g)\nfrom shoal.algos.random import Random"),
    (
        "nets/layers.py",
        "w.normal_(0, 1, generator=g)\nnn.init.orthogonal_(w, gain, generator=g)\nx = torch.randint(3, (1,), **kw)",
    ),
]


def plant(root: Path, name: str, code: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""Planted."""\n\n{code}\n')
    return path


@pytest.mark.parametrize(("name", "code", "rule"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, name: str, code: str, rule: str) -> None:
    plant(tmp_path, "spec.py", "from torch import Tensor")
    plant(tmp_path, name, code)
    found = violations(tmp_path)
    assert len(found) >= 1
    assert all(f.startswith(f"{name}:") for f in found)
    assert f": {rule}: " in found[0]
    assert found[0].startswith(f"{name}:{1 if rule == 'attic' else 3}: ")


@pytest.mark.parametrize(("name", "code"), LAWFUL)
def test_a_lawful_neighbour_is_left_alone(tmp_path: Path, name: str, code: str) -> None:
    plant(tmp_path, name, code)
    assert violations(tmp_path) == []


def test_violations_inside_functions_are_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        "training/loop.py",
        "class A:\n    def f(self):\n        import wandb\n\n        wandb.init()\n        x.backward()",
    )
    assert [f.split(": ")[1] for f in violations(tmp_path)] == ["library", "backward"]


def test_the_planted_would_fail_the_real_tree(tmp_path: Path) -> None:
    """The real files with one line more: the guard sees it there as well."""
    import shutil

    shutil.copytree(ROOT, tmp_path / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    before = violations(tmp_path / "shoal")
    path = tmp_path / "shoal" / "algos" / "ppo.py"
    path.write_text(path.read_text() + "\n\ndef more(loss, gamma):\n    loss.backward()\n    return gamma * loss.item()\n")
    more = [f for f in violations(tmp_path / "shoal") if f not in before]
    assert sorted(f.split(": ")[1] for f in more) == ["backward", "gamma", "item"]
