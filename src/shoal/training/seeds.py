"""One seed makes a tree: worlds, samplers, nets and evaluations draw from generators of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.spec import UserError


def seed_of(seed: int, *path: str | int) -> int:
    """The seed at a path of the tree: the same on every machine, and unlike that of any other path."""
    digest = hashlib.sha256("/".join(map(str, (seed, *path))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def global_seed(seed: int, *path: str | int, device: torch.device) -> Iterator[None]:
    """PyTorch's own generators at a path of the tree, and afterwards as they were: for modules of the user's own that draw from
    them, as dropout does."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(seed, *path))
        yield


def generator(seed: int, *path: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed_of(seed, *path))


def restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    try:
        generator.set_state(state.cpu())
    except RuntimeError:
        raise UserError("the checkpoint is damaged: the state of a generator in it is none.") from None
