"""What tests of algorithms are made of: worlds, frames and batches written down by hand, learners, what their losses are told.

    spec = spec_of(2, Discrete(3), mortal=True)             one group of two agents, of three choices each
    a = make_learner(DDQN, spec, gamma=0.5)                 nets of one layer, in the hands of `set_layer`
    batch = make_batch(obs, next_obs, reward, action)       [T, B, N, ...]; numbers, [T], [T, B] and [T, B, N] are spread
    metrics = update(a, batch)                              draws are the middle ones and memory is empty, unless it has others

A batch of several groups takes dicts. JUNK stands where nothing may look.
"""

import inspect
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from shoal.algos.base import Acted, Seat
from shoal.algos.samples import Samples
from shoal.kernels import native
from shoal.nets.config import NetConfig
from shoal.ops import losses
from shoal.ops.schedules import Now
from shoal.spec import Batch, Box, Discrete, EnvSpec, Frame, Group, Result, View
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_map

JUNK = 4096.0
Y, N = True, False
CPU = torch.device("cpu")
KERNELS = [False] if native.why_not() else [False, True]
HALF_WAY = Now(50, 100, 5)
REPLAY = {"capacity": 2000, "learning_starts": 8, "batch": 8, "every": 32, "rollout": 8}  # a small one
GRU = {"memory": "gru", "memory_width": 8, "hidden": (8,)}


# --- worlds ---


def agent_group(n=1, action=None, name="agents", obs=None, team="t", **more):
    """By default each sees a number for each of its choices, or two."""
    action = action or Discrete(2)
    obs = obs or (2 if isinstance(action, Box) else sum(action.sizes))
    return Group(name, team, tuple(f"{name}_{i}" for i in range(n)), obs if isinstance(obs, tuple) else (obs,), action, **more)


def spec_of(n=1, action=None, **more):
    """A world of one group."""
    group = {k: more.pop(k) for k in ("mortal", "masked", "obs", "team") if k in more}
    return EnvSpec((agent_group(n, action, **group),), **more)


# --- what happened ---


def steps(x):
    """[T, A], [T, B, A] or [T, B, N, A] -> [T, B, N, A]."""
    x = torch.as_tensor(x).float()
    return x[:, None, None] if x.dim() == 2 else x[:, :, None] if x.dim() == 3 else x


def each(x, like, dtype):
    """A number, [T], [T, B] or [T, B, N] -> `like`, [T, B, N]."""
    x = torch.as_tensor(x, dtype=dtype)
    while 0 < x.dim() < 3:
        x = x[..., None]
    return x.expand_as(like).clone()


def make_view(obs, alive=Y, active=None, start=N, legal=None):
    """Of [..., N, *O]."""
    obs = torch.as_tensor(obs).float()
    there = torch.ones(obs.shape[:-1], dtype=torch.bool)
    alive, start = (torch.as_tensor(x, dtype=torch.bool).expand_as(there).clone() for x in (alive, start))
    active = alive.clone() if active is None else torch.as_tensor(active).expand_as(there).clone()
    legal = None if legal is None else torch.as_tensor(legal).expand(*there.shape, -1).clone()
    return View(obs, alive, active, start, legal)


def make_frame(obs, *, state=None, **more):
    """To act on, [B, N, *O]."""
    return Frame({"agents": make_view(obs, **more)}, state)


def make_batch(
    obs,
    next_obs,
    reward=0.0,
    action=0,
    terminated=N,
    over=N,
    alive=Y,
    next_alive=Y,
    legal=None,
    next_legal=None,
    start=N,
    *,
    active=None,  # none: all who are alive
    next_active=None,
    next_start=N,
    extras=None,
    memory=None,
    state=None,
    next_state=None,
    noise=None,
    spec=None,  # whose spaces actions are of; none: what they look like
):
    """Steps in which `obs` is seen, the action done and then `next_obs` seen, and that are paid `reward`; dicts where groups
    differ. What is reported as earned is junk."""
    names = [g.name for g in spec.groups] if spec else [*obs] if isinstance(obs, dict) else ["agents"]
    now, then, actions, results, paid = {}, {}, {}, {}, {}
    for g in names:
        of = lambda x: x[g] if isinstance(x, dict) else x  # noqa: B023, E731
        seen, after = steps(of(obs)), steps(of(next_obs))
        there = torch.ones(seen.shape[:-1], dtype=torch.bool)
        flag = lambda x: None if of(x) is None else each(of(x), there, torch.bool)  # noqa: B023, E731
        now[g] = make_view(seen, flag(alive), flag(active), flag(start), of(legal))
        then[g] = make_view(after, flag(next_alive), flag(next_active), flag(next_start), of(next_legal))
        actions[g] = actions_of(of(action), there, spec[g].action if spec else None)
        paid[g] = each(of(reward), there, torch.float)
        results[g] = Result(torch.full_like(paid[g], JUNK), flag(terminated))
    shape = (*there.shape[:2], -1)
    states = [None if x is None else torch.as_tensor(x).float().reshape(shape) for x in (state, next_state)]
    over, noise = each(over, there, torch.bool)[..., 0], None if noise is None else torch.as_tensor(noise).float()
    extras, memory = {g: (extras or {}).get(g, {}) for g in names}, {g: (memory or {}).get(g, {}) for g in names}
    return Batch(Frame(now, states[0]), Frame(then, states[1]), actions, results, over, extras, memory, paid, noise)


def actions_of(action, there, space=None):
    """[T, B, N] where an action is one choice, else [T, B, N, D]."""
    x = torch.as_tensor(action)
    if isinstance(space, Discrete) or (space is None and x.dim() <= 3 and not x.is_floating_point()):
        return each(x, there, torch.long)
    if x.dim() == 0:
        x = x.expand(*there.shape, len(space.low) if isinstance(space, Box) else len(space.sizes) if space else 1).clone()
    x = steps(x) if x.dim() < 4 else x
    continuous = isinstance(space, Box) if space else x.is_floating_point()
    return x.float() if continuous else x.long()


def take_turns(batch, turn, group="agents"):
    """Who is to move in each step, [T, B, N]; in the next frames everybody else is."""
    batch.frame[group].active, batch.next[group].active = turn, ~turn
    return batch


# --- learners ---

# what numbers worked out by hand were worked out with: not the defaults, which follow from the world and may change
EVERYBODY = {"gamma": 0.99, "lr_schedule": "constant", "noise_keep": 0.0, "entropy": 0.01}
ROLLOUTS = {**EVERYBODY, "rollout": 25, "lr": 7e-4, "epochs": 4, "minibatches": 4}
REPLAYS = {
    **EVERYBODY,
    **{"rollout": 4, "every": 16.0, "learning_starts": 5_000, "grad_clip": 10.0, "target_every": 200, "target_tau": 1.0},
    **{"lr": 5e-4, "huber": 1.0, "n_step": 1, "epsilon_steps": 100_000, "epsilon_keep": 0.0},
}
ACTORS = {
    **REPLAYS,
    "target_every": 1,
    "target_tau": 0.01,
    "lr": 1e-3,
    "huber": None,
    "random_steps": 5_000,
    "noise_steps": 500_000,
}
COUNTERFACTUAL = {
    **{**EVERYBODY, "gamma": 0.95, "rollout": 25, "epsilon_steps": 500_000, "advantage_scope": "none", "critic_slices": 0},
    **{"target_every": 200, "lr": 5e-4},
}


def plain(cls):
    """Settings of a class with which its numbers were worked out by hand."""
    ways = {"COMA": COUNTERFACTUAL, "OnPolicy": ROLLOUTS, "ActorCritic": ACTORS, "OffPolicy": REPLAYS}
    found = next((ways[c.__name__] for c in cls.__mro__ if c.__name__ in ways), {})
    known = {f.name for f in fields(cls.Config)} if found else set()
    return {k: v for k, v in found.items() if k in known}


def make_learner(cls, spec=None, *, groups=None, net=None, kernels=False, peers=True, **config):
    """With nets of one layer, unless `net` says otherwise. It plays all groups, or these, and is its only peer."""
    spec = spec or spec_of()
    groups = tuple(g.name for g in spec.groups) if groups is None else groups
    nets = NetConfig(**{"hidden": (), **(net or {})})
    a = cls(Seat(spec, groups, cls.Config(**{**plain(cls), **config}), nets, torch.Generator().manual_seed(0), kernels=kernels))
    a.peers = dict.fromkeys(groups, a) if peers else {}
    return a


def set_layer(layer, weights, bias=None):
    """One layer of which everything is zero but what is given: weights [out, in] for all agents, or [N, out, in]."""
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        given = torch.as_tensor(weights).float()
        layer.weights[0].copy_(given if layer.weights[0].dim() == 2 else given.mT)  # each agent's own is [N, in, out]
        if bias is not None:
            layer.biases[0].copy_(torch.as_tensor(bias).float())


def prepare(a, batch):
    """Samples of a batch: draws are the middle ones where it has none, and memory is empty."""
    noise = torch.full((a.draws(*batch.over.shape),), 0.5) if batch.noise is None else batch.noise
    empty = a.memory(batch.over.shape[1], CPU)
    memory = {g: {**empty.get(g, {}), **batch.memory.get(g, {})} for g in {**empty, **batch.memory}}
    return Samples(a, replace(batch, noise=noise, memory=memory))


def update(a, batch):
    return a.update(prepare(a, batch))


def td_targets(a, batch, value_tp1, value_t=None):
    """What one that learns from a replay would learn towards in all steps of a batch, and which of it counts."""
    a.chunk = len(batch.over)
    return a.td_target(Samples(a, batch), value_tp1, value_t)


def draw(a, rows, seed=0):
    """Uniform numbers to act by, of each group [rows, N, a.noise]."""
    generator = torch.Generator().manual_seed(seed)
    return {g: torch.rand(rows, a.spec[g].n, a.noise, generator=generator) for g in a.groups}


@torch.no_grad()
def act(a, frame, noise=None, memory=None, explore=None) -> Acted:
    """In a frame [B, ...], exploring where there is noise: a tensor is that of the group `agents`."""
    memory = a.memory(len(frame[a.groups[0]].alive), CPU) if memory is None else memory
    noise = {"agents": noise} if isinstance(noise, torch.Tensor) else noise
    return a.act(frame, memory, noise, noise is not None if explore is None else explore)


# --- what came of it ---


def near(x, y, tol=2e-5):
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    torch.testing.assert_close(x.double(), torch.tensor(y, dtype=torch.float64), rtol=tol, atol=tol)


def moment(optimiser, param):
    """Adam's first moment of one parameter: a tenth of its first gradient."""
    sizes = [p.numel() for p in optimiser._params]
    k = next(k for k, p in enumerate(optimiser._params) if p is param)
    return optimiser.first.split(sizes)[k].reshape(param.shape)


def slope(optimiser, param):
    """The first gradient of one parameter."""
    return 10 * moment(optimiser, param)


def same_state(a, b):
    there = b.state_dict()
    return all(torch.equal(x, there[k]) for k, x in a.state_dict().items())


def inputs(module):
    """The first argument that a module is given, each time from now on."""
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    return seen


def record_losses(monkeypatch, several=False):
    """What value losses are given from now on: value, target and huber of each, and the loss and mask that are summed after
    it; what is summed next are those of an actor. `several`: of several critics, which have the same target."""
    seen, error, total = [], losses.value_error, losses.masked_sum

    def value_error(value, target, huber=None):
        same = target[0] if several else target
        seen.append({"value": value.detach().clone(), "target": same.detach().clone(), "huber": huber})
        return error(value, target, huber)

    def masked_sum(x, mask):
        if seen:
            who = "actor_" if "loss" in seen[-1] else ""
            seen[-1] |= {f"{who}loss": x.detach().clone(), f"{who}mask": mask}
        return total(x, mask)

    monkeypatch.setattr(losses, "value_error", value_error)
    monkeypatch.setattr(losses, "masked_sum", masked_sum)
    return seen


# --- options that change one number ---


@dataclass
class Switch:
    """An option, set or not on top of `base`, with the number that is to be expected of it."""

    measure: Any  # (learner, what was told, metrics) -> the number
    plain: Any
    value: Any
    switched: Any
    base: Any = None  # settings on top of which it is switched
    batch: Any = None  # what differs in the batch

    def cases(self, option):
        """Settings, and the number that they make."""
        assert self.plain != self.switched
        base = self.base or {}
        return [(base, self.plain), ({**base, option: self.value}, self.switched)]


def feed(name):
    """Measures a number of what a learner is fed."""
    return lambda a, *_: float(getattr(a.feed, name) or 0)


STEP_RULE = dict.fromkeys(("optimiser", "beta1", "beta2", "eps", "momentum"), "tests/algos/test_optimiser.py")


def check_every_option_is_tested(classes, switches, elsewhere, tests):
    """A new field of a Config fails here until it is listed in `switches`, or in `elsewhere` with the test that sees it."""
    elsewhere = {**elsewhere, **STEP_RULE}
    assert set(switches) | set(elsewhere) == {f.name for c in classes for f in fields(c.Config)}
    assert not set(switches) & set(elsewhere)
    for option, test in elsewhere.items():
        root = Path(__file__).parents[2]
        source = (root / test).read_text() if test.endswith(".py") else inspect.getsource(tests[test])
        assert option in source, f"{test} says nothing of {option}"


HALVES = """
from torch import nn

class Halves(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.seen = 0

    def update(self, x, mask=None):
        self.seen += x.numel()

    def normalise(self, x, clip=None):
        return x / 2

    def denormalise(self, x):
        return x * 2
"""


def halves(folder):
    """A normaliser of a user's own, as it is asked for."""
    (folder / "halves.py").write_text(HALVES)
    return f"{folder}/halves.py:Halves"


# --- whole worlds ---


def make_loop(name, env, rows=8, /, run=None, **sections):
    run = {"envs": rows, "quiet": True, "steps": 10_000, **(run or {})}
    return Loop(resolve(Settings(name, env, run, sections)))


def collect(loop, steps=16):
    """So many steps of all rows, paid, with the first learner's draws."""
    batch = loop.collector.collect(steps)
    loop.shaping(batch)
    batch.noise = torch.rand(loop.learners[0].draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    return batch


def spoil(batch, waits, gone, group="agents"):
    """A copy in which those who do not act did the other of two choices, and the gone saw and were paid something else."""
    spoilt = tree_map(torch.clone, batch)
    spoilt.actions[group][waits] = 1 - spoilt.actions[group][waits]
    spoilt.frame[group].obs[gone] = 1e3
    spoilt.next[group].obs[gone & ~batch.next[group].alive] = -1e3
    spoilt.learner_reward[group][gone] = 1e3
    return spoilt
