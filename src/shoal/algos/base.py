"""What an algorithm is: it acts for the groups it is bound to, and it learns from samples.

    act(frame, memory, noise, explore) -> Acted(actions, memory, extras)     changes nothing; noise none is greedy
    update(samples) -> metrics                                               device tensors, nothing is read out

An algorithm never steps a world, logs or opens a file. What learns or counts is a module or a buffer, and so is saved.
What it can take is declared in class attributes; `algos/checks.py` compares them with the world before anything starts. What it
learns from is prepared in `algos/samples.py`, what its nets see in `algos/observations.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.checks import bounded, fits
from shoal.algos.deaths import returns_after_death
from shoal.algos.optimiser import TAKES, Optimiser, OptimiserName, StepRule
from shoal.nets.config import NetConfig
from shoal.nets.layers import MLP
from shoal.nets.norm import Running
from shoal.ops import losses, schedules
from shoal.ops.schedules import Now
from shoal.ops.values import as_vector
from shoal.spec import Batch, EnvSpec, Frame, UserError, View
from shoal.tree import split_groups, tree_leaves, tree_map, zero_where

if TYPE_CHECKING:
    from shoal.algos.samples import Samples

AfterDeath = Literal["auto", "team", "own"]


@dataclass(frozen=True)
class Rollout:
    """Feed: every so many steps, all that happened since, once. `episodes`: of each row its first so many episodes in these
    steps; where they end early what comes after them is padding, and then all rows begin new ones."""

    steps: int
    episodes: int | None = None


@dataclass(frozen=True)
class Replay:
    """Feed: after `start` environment steps, for every `every` of them, an update on `batch` sequences of `length` steps that
    are drawn from the last `capacity`. Counted in environment steps, all rows together."""

    batch: int
    length: int
    start: int
    every: float
    capacity: int
    steps: int = 1  # of each row between updates
    alpha: float | None = None  # drawn in proportion to priority ** alpha; none: evenly
    beta: float = 0.4  # how far their weights make up for that at first; wholly at the run's end
    whole: bool = False  # sequences are whole episodes


def rollout_of(config: Any, spec: EnvSpec) -> Rollout:
    """Of so many `episodes`, or else of `rollout` steps."""
    if config.episodes is None:
        return Rollout(config.rollout)
    if spec.horizon is None:
        raise UserError("--algo.episodes needs a world whose episodes have a longest length: give --algo.rollout instead.")
    return Rollout(config.episodes * spec.horizon, config.episodes)


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of all who learn. `rules`: those that follow from the world and the run, where nobody gave them."""

    rules: ClassVar[defaults.Rules] = {"gamma": defaults.gamma}

    rollout: int | None = 25  # steps of every row between updates
    gamma: float | None = None  # discount; none: 0.95 where episodes last at most 50 steps, else 0.99
    time_limit: bool = True  # bootstrap where an episode was cut off; false: as if it had terminated
    after_death: AfterDeath = "auto"  # a return ends with the agent (own) or its team's episode; auto: team if pay is common
    huber: float | None = None  # value errors beyond this count linearly; none: squared errors
    lr: float | None = 5e-4  # learning rate
    lr_schedule: str = "linear"  # constant, linear, cosine, exponential (:0.999/update), StepLR:step_size=100, module:Class
    lr_last: float = 0.0  # share of the learning rate that its schedule ends at
    optimiser: OptimiserName = "adamw"  # AdamW, or another of PyTorch's
    beta1: float | None = None  # of adamw and adam, how much of the mean gradient stays at each step; none: 0.9
    beta2: float | None = None  # of adamw, adam and rmsprop, how much of its mean square stays; none: 0.999, of rmsprop 0.99
    eps: float | None = None  # of the same, added to the root of the mean square; none: 1e-5
    momentum: float | None = None  # of rmsprop and sgd, how much of the last step stays; none: 0
    weight_decay: float = (
        0.0  # times a weight: what adamw takes off at each step, times the rate, and the others add to the gradient
    )
    grad_clip: float | None = 10.0  # norm beyond which gradients are scaled down; none: never
    normalise_obs: bool = True  # observations of mean 0 and deviation 1, by running statistics
    normalise_reward: bool = False  # rewards divided by their running root mean square
    normaliser: str | None = None  # your own in place of the running one: package.module:Class, or file.py:Class:clip=5
    reward_scale: float = 1.0  # rewards are multiplied by it before anything is learnt; reported returns stay raw
    shaper: str | None = None  # your own function (reward, obs, step, steps) -> reward, as module:name or file.py:name

    def __post_init__(self) -> None:
        shares = {
            **dict.fromkeys(("gamma", "lr_last"), (0.0, 1.0)),
            **dict.fromkeys(("beta1", "beta2", "momentum"), (0.0, 0.999999)),
        }
        bounded(self, {**shares, "weight_decay": (0, 1e30)}, ("rollout", "lr", "huber", "grad_clip", "reward_scale", "eps"))
        for name in ("beta1", "beta2", "eps", "momentum"):
            if getattr(self, name) is not None and name not in TAKES[self.optimiser]:
                takes = " and ".join(f"--algo.{x}" for x in TAKES[self.optimiser])
                raise UserError(f"--algo.{name} is not for {self.optimiser}, which takes {takes}.")

    @property
    def step_rule(self) -> StepRule:
        given = {k: getattr(self, k) for k in TAKES[self.optimiser] if getattr(self, k) is not None}
        return StepRule(self.optimiser, **{**({"beta2": 0.99} if self.optimiser == "rmsprop" else {}), **given})


@dataclass(frozen=True)
class StateConfig:
    """Further settings of those whose critics or mixer may see more than an agent does."""

    normalise_state: bool | None = None  # normalise_obs for what is seen of the team or the world; none: the same
    state_normaliser: str | None = None  # the normaliser of what is seen of the team or the world; none: the same


@dataclass(frozen=True)
class Seat:
    """What an algorithm is made with: the world as it is seen from here, and whom it plays in it."""

    spec: EnvSpec
    groups: tuple[str, ...]
    config: Any
    net: NetConfig
    generator: torch.Generator  # for first weights, on the CPU: the same on every device
    device: torch.device | str = "cpu"
    kernels: bool = False  # take Shoal's own kernels wherever there is one
    steps: int = 1_000_000  # environment steps of the run


class Acted(NamedTuple):
    """What `act` gives, for each group."""

    actions: dict[str, Tensor]
    memory: dict[str, Any]
    extras: dict[str, dict[str, Tensor]]  # what the update wants to know of the step, [B, N, ...]


class Algorithm(nn.Module, ABC):
    names: ClassVar[dict[str, dict[str, Any]]] = {}  # further names, each a setting of this one
    takes: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # kinds of actions
    reward: ClassVar[Literal["any", "common"]] = "any"  # common: a team's agents must be paid alike
    turns: ClassVar[bool] = True  # can play turn-based worlds
    mortal: ClassVar[bool] = True  # can take agents that die or arrive late
    learns: ClassVar[bool] = True
    greedy: ClassVar[bool] = True  # evaluated without noise; else it draws there as well
    unit: ClassVar[Literal["group", "team"]] = "group"  # what one instance plays; groups of a team may have unlike spaces
    net_defaults: ClassVar[dict[str, Any]] = {}  # of `NetConfig`, where nobody says otherwise

    value_metric: ClassVar[str | None] = None  # of its metrics the mean value of actions taken, in units of `samples.reward`

    @dataclass(frozen=True)
    class Config(LearnerConfig):
        pass

    id: str = ""  # the name it was asked for by
    as_one: bool = False  # its agents have one value, their team's, in which the dead count as nothing
    metric_agents: int | None = None  # of how many agents metrics are given one by one (`--log.agents`); none: they are not
    remark: str | None = None  # a sentence for whoever starts a run: what a setting costs
    burn_in: int = 0  # steps at the beginning of a sequence that only bring memory up to date
    feed: Rollout | Replay
    reward_norm: Running | None

    def __init__(self, seat: Seat):
        super().__init__()
        spec, groups = seat.spec, seat.groups
        config = defaults.filled(seat.config, spec, groups, seat.steps)
        fits(type(self), spec, groups)
        if self.learns and not isinstance(config, LearnerConfig):
            raise UserError(
                f"the Config of {type(self).__name__} must derive from shoal.algos.base.LearnerConfig, which has the settings "
                "that all learners share."
            )
        self.spec, self.groups, self.config, self.net, self.kernels = spec, groups, config, seat.net, seat.kernels
        self.bound = groups  # those it was made for; it may come to play fewer
        first = spec[groups[0]]
        for other in (spec[g] for g in groups[1:]):
            if self.unit == "group" and (other.obs, other.action) != (first.obs, first.action):
                raise UserError(
                    f"one {type(self).__name__} cannot play {first.name!r} and {other.name!r}: their spaces differ."
                )
        self.space, self.reward_norm = first.action, None
        self.n = sum(spec[g].n for g in groups)
        self.recurrent = seat.net.memory != "none"
        self.has_inactive = spec.turns or any(spec[g].mortal for g in groups)  # not everybody acts all the time
        self.returns_after_death = returns_after_death(spec, groups, getattr(config, "after_death", "own"))

    def schedule(
        self, name: str, first: float | None = None, last: float | None = None, shape: str | None = None
    ) -> schedules.Schedule:
        """What the setting `<name>_schedule` asks for: from a value to its last, by default the share `<name>_last` of it."""
        c = self.config
        first = getattr(c, name) if first is None else first
        last = first * getattr(c, f"{name}_last") if last is None else last
        return schedules.make(shape or getattr(c, f"{name}_schedule"), first, last, f"--algo.{name.replace('_', '-')}-schedule")

    def make_optimiser(self, modules: Iterable[nn.Module], rate: float) -> Optimiser:
        """Over these modules, as the settings say. They must be in their place."""
        c = self.config
        return Optimiser(modules, rate, c.weight_decay, c.grad_clip, self.kernels, c.step_rule)

    def place(self, device: torch.device | str) -> None:
        """Move all nets to the device, before optimisers lay their weights end to end; there they take their kernels."""
        self.to(device)
        for m in self.modules():
            if self.kernels and isinstance(m, MLP):
                m.use_kernels()

    @property
    def nets(self) -> dict[str, nn.Module]:
        """Its nets by name, for those who want them in files of their own."""
        return dict(self.named_children())

    # --- acting ---

    noise: int = 0  # uniform numbers an agent takes to act

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        """Zero memory for each group, a tree of [B, N, ...]: that of the modules `actor` and `critic`, where they have one."""
        nets = {k: getattr(self, k, None) for k in ("actor", "critic")}
        zero = {k: m.zero_memory(rows, device) for k, m in nets.items() if m is not None and self.recurrent}
        return split_groups(self.spec, self.groups, zero, 1)

    @abstractmethod
    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        """Actions in the frames [B, ...], or [T, B, ...] of a batch; noise: uniform numbers [B, N, self.noise]."""

    def remembers(self, view: View) -> Tensor:
        """[..., N] whose memory goes on: that of those who act. Where values of the dead are learnt, theirs as well, of the
        zeros that they see: a memory that stood still would keep their value at that of their last living step."""
        return view.active | ~view.alive if self.values_dead else view.active

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        """Uniform numbers an update of [steps, rows] takes, in `samples.noise`."""
        return 0

    def set_schedules(self, now: Now) -> None:
        """Set what is scheduled, by filling tensors."""
        return None

    def variant(self) -> int:
        """Asked before an update where tensors can be looked at: which kind of update it will be, if there are several."""
        return 0

    def update_statistics(self, batch: Batch) -> None:
        """What was collected just now, for those who learn from a replay: statistics of observations and rewards move here."""
        return None

    @abstractmethod
    def update(self, samples: Samples) -> dict[str, Tensor]: ...

    def metric_means(self, each: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
        """For `update` to return: the mean of each [..., N] over who is active, and where asked for what is each agent's."""
        return losses.means(each, mask, self.metric_agents)

    def most_bonus(self) -> Tensor | None:
        """What values count beside each step's reward, at most."""
        return None

    def values(self, frame: Frame) -> Tensor | None:
        """V of a batch's frames [T, B, N], in the units of the rewards that are learnt from, by nets without memory: what the
        probes compare with the answer. None: it has no values."""
        return None

    # --- others who play the world ---

    peers: Mapping[str, Algorithm] = {}  # who plays each group of the world, itself among them
    needs_peers: bool = False  # its update asks them for their actions

    @torch.no_grad()
    def target_actions(self, batch: Batch, group: str, noise: dict[str, Tensor] | None = None, now: bool = False) -> Tensor:
        """What this group would do in the batch's next frames: [T, B, N, A] one-hot where discrete, else [T, B, N, D]. By the
        target's actor where there is one, else by the policy as it acts; `now`: by the policy, in the batch's own frames. For
        the critics of peers; no gradient. noise: for each of its groups [T, B, N, K], none: greedily."""
        rows, device = batch.over.shape[1], batch.over.device
        memory = {g: batch.memory.get(g, m) for g, m in self.memory(rows, device).items() if g in self.groups}
        if not tree_leaves(memory):
            chosen = self.target_act(batch.frame if now else batch.next, memory, noise, not now).actions[group]
        else:
            steps = []
            for t in range(len(batch.over)):
                frame, following, u = tree_map(lambda x: x[t], (batch.frame, batch.next, noise))  # noqa: B023
                actions, memory, _ = self.target_act(
                    frame, {g: zero_where(frame[g].start, m) for g, m in memory.items()}, u, not now
                )
                if not now:
                    actions, _, _ = self.target_act(
                        following, {g: zero_where(following[g].start, m) for g, m in memory.items()}, u, True
                    )
                steps.append(actions[group])
            chosen = torch.stack(steps)
        return as_vector(chosen, self.spec[group].action)

    def target_act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, target: bool) -> Acted:
        """As `act`, without exploring; `target`: by target nets, where there are some."""
        return self.act(frame, memory, noise, False)

    @property
    def values_dead(self) -> bool:
        """Whether every agent has a value of its own, which goes on after its death."""
        return self.returns_after_death and not self.as_one
