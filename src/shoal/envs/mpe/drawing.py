"""How a row of a particle world is drawn: its bodies, and what agents say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.envs.drawing import Circle, Sketch

if TYPE_CHECKING:
    from shoal.envs.mpe.world import Scenario


def sketch(world: Scenario, row: int) -> Sketch:
    pos = world.state["pos"][row].tolist()
    special = world.colors(world.state, row)
    circles = []
    for i in world.marks + world.everyone:  # agents over landmarks
        body, is_agent = world.bodies[i], i in world.everyone
        x, y = pos[i]
        if abs(x) < 100:  # treasures that are out of play wait far away
            color, label = special.get(i, body.color), body.name if is_agent else ""
            circles.append(Circle(x, y, body.size, color, label, body.collides or is_agent))
    lines = []
    for i in world.talkers:
        message = world.state["comm"][row, i].tolist()
        if world.config.actions == "continuous":
            word = " ".join(f"{x:.2f}" for x in message)
        else:
            word = chr(ord("A") + message.index(max(message))) if any(message) else "nothing yet"
        lines.append(f"{world.bodies[i].name} says {word}")
    return Sketch(tuple(circles), tuple(lines))
