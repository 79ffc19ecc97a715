"""What every algorithm stands on: who is refused, settings within bounds, what peers are asked for, groups side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from bench import N, Y, agent_group, make_batch, make_learner, make_loop, spec_of
from torch import Tensor

from shoal.algos.base import Acted, Algorithm, Rollout, Seat
from shoal.algos.checks import bounded, fits
from shoal.algos.samples import Samples
from shoal.nets.config import NetConfig
from shoal.spec import Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, UserError
from shoal.tree import cat_groups, split_groups

TWO_NUMBERS = Box((-1.0, -1.0), (1.0, 1.0))


class Fake(Algorithm):
    """Chooses what its observation's first number says."""

    feed = Rollout(1)
    choose: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(lambda obs: obs[..., 0].long())

    def act(self, frame: Frame, memory: Any, noise: Any, explore: bool) -> Acted:
        assert noise is None
        assert not explore
        return Acted({g: self.choose(frame[g].obs) for g in self.groups}, memory, {g: {} for g in self.groups})

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}


def fake(spec: EnvSpec, choose: Callable[[Tensor], Tensor] = Fake.choose) -> Fake:
    return make_learner(type("Fake", (Fake,), {"choose": staticmethod(choose)}), spec)


# --- who is refused ---


def group(name: str = "agents", n: int = 2, **more: Any) -> Group:
    return agent_group(n, more.pop("action", Discrete(3)), name, team=name, **more)


def refused(spec: EnvSpec, **attributes: Any) -> str:
    cls, groups = type("Picky", (Fake,), attributes), tuple(g.name for g in spec.groups)
    with pytest.raises(UserError) as e:
        fits(cls, spec, groups)
    with pytest.raises(UserError, match="Picky"):
        cls(Seat(spec, groups, cls.Config(), NetConfig(), torch.Generator()))
    return str(e.value)


def test_each_refusal() -> None:
    box = Box((-1.0,), (1.0,))
    assert (
        refused(EnvSpec((group(), group("b", action=box))), takes=("discrete", "multi-discrete"))
        == "Picky takes discrete and multi-discrete actions; those of 'b' are continuous."
    )
    assert refused(EnvSpec((group(),)), takes=("continuous",)) == (
        "Picky takes continuous actions; those of 'agents' are discrete."
    )
    assert refused(EnvSpec((group(mortal=True),)), mortal=False) == (
        "Picky cannot take agents that die or arrive late, as those of 'agents' do."
    )
    assert refused(EnvSpec((group(),), turns=True), turns=False) == "Picky cannot play turn-based worlds."
    assert refused(EnvSpec((group(),)), reward="common") == (
        "Picky needs agents that are paid alike: ask for --reward team-mean or --reward team-sum."
    )


def test_what_fits_is_not_refused() -> None:
    spec = EnvSpec((group(mortal=True), group("b", action=Box((-1.0,), (1.0,)))), turns=True, common=True)
    fits(type("Any", (Fake,), {"reward": "common"}), spec, ["agents", "b"])
    # only the groups that it is bound to matter
    fits(type("Some", (Fake,), {"takes": ("discrete",)}), spec, ["agents"])
    fits(type("Some", (Fake,), {"mortal": False}), spec, ["b"])


# --- settings out of bounds ---


@dataclass(frozen=True)
class Config:
    share: float | None = 0.5
    weight: float = 1.0
    n_step: int | None = 3


def test_a_learner_without_the_settings_of_all_learners_is_refused() -> None:
    with pytest.raises(UserError, match=r"the Config of Own must derive from shoal\.algos\.base\.LearnerConfig"):
        make_learner(type("Own", (Fake,), {"Config": Config}))
    make_learner(type("Own", (Fake,), {"Config": Config, "learns": False}))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Config(share=1.5), "--algo.share is 1.5: it must be between 0 and 1."),
        (Config(share=-0.1), "--algo.share is -0.1: it must be between 0 and 1."),
        (Config(weight=-1.0), "--algo.weight is -1.0: it must be at least 0."),
        (Config(n_step=0), "--algo.n-step is 0: it must be more than zero."),
        (Config(n_step=-2), "--algo.n-step is -2: it must be more than zero."),
        (Config(weight=float("nan")), "--algo.weight is nan: it must be at least 0."),
        (Config(share=float("nan")), "--algo.share is nan: it must be between 0 and 1."),
    ],
)
def test_what_is_out_of_bounds_is_one_sentence(config: Config, sentence: str) -> None:
    with pytest.raises(UserError) as e:
        bounded(config, {"share": (0, 1), "weight": (0, 1e30)}, ("n_step",))
    assert str(e.value) == sentence


@pytest.mark.parametrize("config", [Config(), Config(0.0, 0.0, 1), Config(1.0, 1e20, 10**9), Config(share=None, n_step=None)])
def test_bounds_are_within_and_what_is_none_or_not_there_is_let_be(config: Config) -> None:
    bounded(config, {"share": (0, 1), "weight": (0, 1e30), "elsewhere": (5, 6)}, ("n_step", "nowhere"))


# --- peers ---


def target_actions(a: Fake, next_obs: Any) -> Tensor:
    """In frames [T, B, N, O] that follow others, in which it would do something else."""
    next_obs = torch.as_tensor(next_obs)
    return a.target_actions(make_batch(torch.zeros_like(next_obs), next_obs, spec=a.spec), "agents")


def test_target_actions_are_one_hot() -> None:
    a = fake(spec_of(2, Discrete(3), obs=(1,)))
    out = target_actions(a, [[[[2.0], [0.0]]], [[[1.0], [1.0]]]])  # [T 2, B 1, N 2, O 1]
    assert out.tolist() == [[[[0.0, 0, 1], [1.0, 0, 0]]], [[[0.0, 1, 0], [0.0, 1, 0]]]]


def test_target_actions_of_several_choices_end_to_end() -> None:
    a = fake(spec_of(2, MultiDiscrete((3, 2)), obs=(2,)), lambda obs: obs.long())
    assert target_actions(a, [[[[2.0, 0.0], [0.0, 1.0]]]]).tolist() == [[[[0.0, 0, 1, 1, 0], [1.0, 0, 0, 0, 1]]]]


def test_target_actions_continuous_and_without_gradient() -> None:
    obs = torch.tensor([[[[0.25, -0.5], [1.0, 2.0]]]], requires_grad=True)
    out = target_actions(fake(spec_of(2, TWO_NUMBERS), lambda obs: obs * 2), obs)
    assert out.tolist() == [[[[0.5, -1.0], [1.0, 1.0]]]]  # as the world takes them: clipped
    assert not out.requires_grad


# --- groups side by side ---


def test_groups_are_put_side_by_side_and_apart_again() -> None:
    spec, groups = EnvSpec((group("a", 2), group("b", 3))), ("a", "b")
    parts = {"a": torch.zeros(4, 5, 2, 7), "b": torch.ones(4, 5, 3, 7)}
    whole = cat_groups(groups, parts.__getitem__, 2)
    assert whole.shape == (4, 5, 5, 7)
    back = split_groups(spec, groups, whole, 2)
    assert all(torch.equal(back[g], parts[g]) for g in "ab")
    assert cat_groups(groups, lambda g: None, 2) is None
    assert fake(spec).n == 5


def test_a_mask_of_who_acts_where_not_everybody_always_does() -> None:
    obs = {"a": torch.zeros(3, 1, 2, 3), "b": torch.zeros(3, 1, 1, 3)}
    always = fake(EnvSpec((group("a", 2), group("b", 1))))
    assert Samples(always, make_batch(obs, obs)).active is None  # everybody acts all the time
    mortal = fake(EnvSpec((group("a", 2, mortal=True), group("b", 1))))
    active = Samples(mortal, make_batch(obs, obs, active={"a": N, "b": Y})).active
    assert active is not None
    assert active[0, 0].tolist() == [False, False, True]
    assert fake(EnvSpec((group(),), turns=True)).has_inactive
    assert not fake(EnvSpec((group(),))).has_inactive


# --- partners ---


@pytest.mark.parametrize("algo", ["ddqn", "iql", "coma"])
def test_who_does_not_learn_any_more_explores_no_more(algo: str) -> None:
    """Whatever epsilon its checkpoint has: a partner of another run is what it learnt, not a random one."""
    net = {"hidden": (), "gain_actor": 100.0}  # so sure that a draw is the choice itself
    loop = make_loop(algo, "simple_spread", 64, run={"reward": "team-mean"}, net=net, algo={"rollout": 2})
    (player,) = loop.players.algorithms
    player.epsilon.fill_(1.0)  # type: ignore[operator, union-attr]
    frame, memory = loop.collector.frame, loop.collector.memory
    noise = loop.players.noise(torch.Generator().manual_seed(0), 64)
    greedy = player.act(frame, memory, None, False).actions["agents"]
    learning = player.act(frame, memory, noise, True).actions["agents"]
    player.learns = False  # type: ignore[misc]
    frozen = player.act(frame, memory, noise, True).actions["agents"]
    assert (learning == greedy).float().mean() < 0.4
    assert (frozen == greedy).float().mean() > 0.98
