"""A speaker that cannot move knows which of three landmarks is the goal; a listener that cannot talk has to go there.

The speaker sees the goal's colour and says one of three words; the listener sees the landmarks and the word. Both are paid
minus the listener's squared distance to the goal. This is `mpe2`'s simple_speaker_listener_v4. Under `rules = openai` each
is paid the sum over the two, which is twice that.
"""

from __future__ import annotations

from torch import Tensor

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import Body
from shoal.envs.mpe.world import Parts, Scenario, length

MARKS = ((0.65, 0.15, 0.15), (0.15, 0.65, 0.15), (0.15, 0.15, 0.65))  # colours of the landmarks


class SimpleSpeakerListener(Scenario):
    words = 3
    goals = 1
    teams = {"speaker": "team", "listener": "team"}
    common = True
    stats_over = {"distance": "mean"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        speaker = Body("speaker_0", size=0.075, collides=False, movable=False, silent=False)
        marks = [Body(f"landmark_{i}", size=0.04, collides=False, color=c) for i, c in enumerate(MARKS)]
        return [speaker, Body("listener_0", size=0.075, collides=False)], marks

    def setup(self) -> None:
        self.shades = self.tensor(MARKS)
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        ears = self.everyone[1:]
        marks = self.gaps(w, ears, self.marks)
        return {
            "speaker": [("goal", self.shades[w["goal"]])],
            "listener": [("self", self.velocities(w, ears)), ("landmark", marks), ("message", w["comm"][:, :1])],
        }

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        distance = length(self.places(w, self.everyone[1:]) - self.aims(w))  # [B, 1]
        times = 2 if self.config.rules == "openai" else 1
        return -times * distance.square().expand(-1, 2), {"distance": distance[:, 0]}

    def colors(self, w: State, row: int) -> dict[int, Color]:
        red, green, blue = MARKS[int(w["goal"][row, 0])]
        return {1: (red + 0.35, green + 0.35, blue + 0.35)}  # the listener, in a lighter shade of its goal
