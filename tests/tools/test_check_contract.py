"""check_contract: a sound world passes, and each broken one is refused with a sentence for everything that is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.api import make
from shoal.envs.base import Move, World
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result
from shoal.tools.contract import check_contract


class Sound(World):
    """Two agents see a number each and are paid their actions; the second dies in step 3, and an episode has 8."""

    noise_begin = noise_step = 2

    def setup(self) -> None:
        group = Group("agents", "agents", ("a", "b"), (1,), Discrete(2), mortal=True)
        self.spec = EnvSpec((group,), horizon=8)

    def begin(self, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": noise, "age": self.tensor([0] * self.rows, torch.long)}

    def alive(self, age: torch.Tensor) -> torch.Tensor:
        return torch.stack((age >= 0, age < 3), -1)  # [B, 2]

    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        was, now = self.alive(state["age"]), self.alive(state["age"] + 1)
        result = Result(actions["agents"].to(self.dtype) * was, was & ~now)
        return Move({"x": torch.where(now, noise, state["x"]), "age": state["age"] + 1}, {"agents": result})

    def observe(self, state: Any) -> Frame:
        alive = self.alive(state["age"])
        view = replace(self.view(state["x"][..., None], state["clock"]), alive=alive, active=alive)
        return Frame({"agents": replace(view, start=view.start & alive)})


class EverythingIsAFirstFrame(Sound):
    def observe(self, state: Any) -> Frame:
        view = super().observe(state)["agents"]
        return Frame({"agents": replace(view, start=view.alive)})


class WrongShape(Sound):
    def observe(self, state: Any) -> Frame:
        view = super().observe(state)["agents"]
        return Frame({"agents": replace(view, obs=view.obs[..., 0])})  # type: ignore[call-overload,index]


class WrongDtype(Sound):
    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        move = super().advance(state, actions, noise)
        result = move.results["agents"]
        return replace(move, results={"agents": replace(result, terminated=result.terminated.float())})


class NobodyTerminates(Sound):
    """Fine as it is: who leaves without having terminated was truncated."""

    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        move = super().advance(state, actions, noise)
        return replace(move, results={"agents": replace(move.results["agents"], terminated=self.never(2))})


class TheTerminatedStay(Sound):
    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        move = super().advance(state, actions, noise)
        return replace(move, results={"agents": replace(move.results["agents"], terminated=self.alive(state["age"]))})


class NeverOver(Sound):
    def setup(self) -> None:
        super().setup()
        self.spec = replace(self.spec, horizon=None)

    def alive(self, age: torch.Tensor) -> torch.Tensor:
        return torch.stack((age < 4, age < 3), -1)


class DrawsForItself(Sound):
    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        return super().advance(state, actions, torch.rand_like(noise))


class ForgetsItsState(Sound):
    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "x": torch.zeros_like(self.state["x"])}


class NotANumber(Sound):
    def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
        move = super().advance(state, actions, noise)
        return replace(move, results={"agents": replace(move.results["agents"], reward=move.results["agents"].reward / 0)})


BROKEN = {
    EverythingIsAFirstFrame: ["`start` of 'agents' is not what it should be: true in an agent's first frame, and in no other."],
    WrongShape: ["the observation of 'agents' in the first frame has shape [4, 2]: it must be [4, 2, 1]."],
    WrongDtype: ["`terminated` of 'agents' is float32: it must be bool."],
    TheTerminatedStay: ["some of 'agents' terminated and are still alive in `next`: who ended is gone."],
    NeverOver: ["everybody is gone and the row is not over: set `over` when the last one leaves."],
    DrawsForItself: [
        "the same noise and actions led elsewhere: make all of it follow from the noise, the actions and the state."
    ],
    ForgetsItsState: [
        "what follows set_state(get_state()) is not what followed then: a run on it cannot be resumed as it was; "
        "put everything that matters into the state."
    ],
    NotANumber: [
        "a reward of 'agents' is not finite: see where it divides, or takes a root or a logarithm.",
    ],
}


@pytest.mark.parametrize("world", [Sound, NobodyTerminates])
def test_a_sound_world(world: type[World]) -> None:
    check_contract(world(rows=4))


def test_a_sound_world_of_a_library() -> None:
    pytest.importorskip("gymnasium")
    env = make("gymnasium/CartPole-v1", rows=2, workers=0)
    check_contract(env)
    env.close()


@pytest.mark.parametrize("world", BROKEN)
def test_a_broken_world(world: type[World]) -> None:
    with pytest.raises(AssertionError) as e:
        check_contract(world(rows=4))
    assert str(e.value).splitlines() == [f"{world.__name__} breaks the contract of an Environment:", *BROKEN[world]]


def test_all_that_is_wrong_is_listed() -> None:
    class Both(EverythingIsAFirstFrame, ForgetsItsState):
        pass

    with pytest.raises(AssertionError) as e:
        check_contract(Both(rows=4))
    assert str(e.value).splitlines()[1:] == [*BROKEN[EverythingIsAFirstFrame], *BROKEN[ForgetsItsState]]


def test_what_the_environment_raises_is_passed_on() -> None:
    class Raises(Sound):
        def advance(self, state: Any, actions: Any, noise: torch.Tensor) -> Move:
            raise KeyError("colour")

    with pytest.raises(KeyError, match="colour"):
        check_contract(Raises(rows=4))
