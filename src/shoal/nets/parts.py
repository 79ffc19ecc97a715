"""The parts of an observation: its numbers, in a row, and its images.

A prepared observation is a tensor [..., N, width], or where there are images a dict of them and of VECTOR.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.spec import Group, Shape

VECTOR = ""  # the name of the numbers beside the images, which no image has


def images_of(obs: Shape | dict[str, Shape]) -> dict[str, Shape]:
    """The parts of an observation that are images, by name."""
    named = obs if isinstance(obs, dict) else {"image": obs}
    return {k: s for k, s in named.items() if len(s) == 3}


def vector_width(obs: Shape | dict[str, Shape]) -> int:
    """How many numbers an observation has beside its images."""
    named = obs if isinstance(obs, dict) else {"": obs}
    return sum(torch.Size(s).numel() for s in named.values() if len(s) != 3)


def flat(obs: Tensor, shape: Shape) -> Tensor:
    """[..., N, *shape] -> float [..., N, width]."""
    obs = obs.float()
    return obs if len(shape) == 1 else obs.flatten(-len(shape)) if shape else obs[..., None]


def parts_of(obs: Any, group: Group) -> tuple[Tensor | None, dict[str, Tensor]]:
    """An observation's numbers in a row [..., N, width], or none; and its images by name, as they are."""
    named = group.obs if isinstance(group.obs, dict) else {"image" if len(group.obs) == 3 else VECTOR: group.obs}
    given = obs if isinstance(obs, dict) else dict.fromkeys(named, obs)
    vectors = [flat(given[k], shape) for k, shape in named.items() if len(shape) != 3]
    vector = None if not vectors else vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)
    return vector, {k: given[k] for k, shape in named.items() if len(shape) == 3}
