"""JaxMARL's IPPO: `make_train` of `baselines/IPPO/ippo_ff_mpe.py` in a checkout that the user names, jitted as it does itself.

A piece is one call, that is a whole training of as many updates as take about a second and a half, compiled beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INSTALL = (
    (
        *('jax==0.11.2; python_version >= "3.12"', 'jax==0.10.2; python_version < "3.12"'),
        *("flax", "optax", "chex", "distrax", "gymnax", "jaxtyping", "safetensors", "matplotlib"),
    ),
)
SCRIPT = Path("baselines") / "IPPO" / "ippo_ff_mpe.py"
STANDINS = Path(__file__).parent / "standins"
NEVER_REAL = ("wandb", "hydra", "omegaconf")  # logging to a service and reading YAML are no part of the work
IF_MISSING = ("distrax", "gymnax", "matplotlib", "safetensors")
CALL = 1.5  # seconds that a call should take


def refuse(work: SimpleNamespace) -> str | None:
    if work.algo in ("qmix", "maddpg"):
        return "jaxmarl's QMIX is recurrent, and these nets are not, and it has no MADDPG: --algo ippo."
    if not work.jaxmarl:
        return "jaxmarl needs a checkout of JaxMARL, for its baselines are not in its package: --jaxmarl FOLDER."
    if not (Path(work.jaxmarl) / SCRIPT).is_file():
        return f"--jaxmarl {work.jaxmarl} is no checkout of JaxMARL: it has no {SCRIPT}."
    if work.algo != "ippo":
        return "jaxmarl has no feed-forward MAPPO for particle worlds: --algo ippo."
    if list(work.hidden) != [64, 64]:
        return "jaxmarl's script has two layers of 64 written into it: --hidden 64,64."
    if work.rows * work.steps * 3 % work.minibatches:
        return f"jaxmarl cannot cut {work.rows} x {work.steps} steps of 3 agents into {work.minibatches} equal minibatches."
    return None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if work.device == "cuda" else "cpu"  # callbacks need the CPU
    sys.path[:0] = [str(Path(work.jaxmarl).resolve()), str((Path(work.jaxmarl) / SCRIPT).parent.resolve())]
    stood_in = stand_in()

    import jax

    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if work.precision == "tf32" else "float32")
    script = importlib.import_module(SCRIPT.stem)
    compiled: list[float] = []

    def compile_for(updates: int) -> Callable[[Any], Any]:
        config = {
            **{"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5},
            **{"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ENV_NAME": "MPE_simple_spread_v3", "ENV_KWARGS": {}},
            **{"ANNEAL_LR": True, "NUM_ENVS": work.rows, "NUM_STEPS": work.steps, "UPDATE_EPOCHS": work.epochs},
            **{"NUM_MINIBATCHES": work.minibatches, "TOTAL_TIMESTEPS": updates * work.rows * work.steps},
        }
        began = time.perf_counter()
        train = jax.jit(script.make_train(config)).lower(jax.random.PRNGKey(0)).compile()
        compiled.append(round(time.perf_counter() - began, 2))
        return train

    def seconds(train: Callable[[Any], Any]) -> float:
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.PRNGKey(0)))
        return time.perf_counter() - began

    updates = 4
    train = compile_for(updates)
    seconds(train)
    if (spent := seconds(train)) < CALL / 2:
        updates = max(updates, round(updates * CALL / spent))
        train = compile_for(updates)
    calls = 0

    def piece() -> int:
        nonlocal calls
        calls += 1
        jax.block_until_ready(train(jax.random.PRNGKey(calls)))
        return updates * work.rows * work.steps

    names = ("jax", "jaxlib", "flax", "optax", "distrax")
    return {
        "versions": {"jaxmarl": importlib.import_module("jaxmarl").__version__, **versions(names, stood_in)},
        "precision": work.precision,
        "threads": work.threads,
        "measured": f"calls of {updates} updates of jit(make_train(config)), compiled beforehand",
        "differs": [
            "a call begins with new networks and worlds; the host is called back with the metrics once an update",
            f"stand-ins for {', '.join(stood_in)}",
        ],
        "compile_seconds": compiled,
        "device": str(jax.devices()[0]),
    }, piece


def stand_in() -> list[str]:
    """Puts our stand-ins where a package is not wanted or not there; returns which were used."""
    missing = [name for name in IF_MISSING if importlib.util.find_spec(name) is None]
    sys.path.append(str(STANDINS))
    for name in NEVER_REAL:
        spec = importlib.util.spec_from_file_location(name, STANDINS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return [*NEVER_REAL, *missing]


def versions(names: tuple[str, ...], stood_in: list[str]) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in names:
        if name not in stood_in:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = getattr(sys.modules.get(name), "__version__", "unknown")
    return found
