"""Functions over trees of tensors: dicts, dataclasses, tuples and none, to any depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.spec import EnvSpec


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The same tree with `f` applied to each leaf, and to the leaves at the same place in `rest`."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {k: tree_map(f, v, *(r[k] for r in rest)) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(f, v, *(r[i] for r in rest)) for i, v in enumerate(tree))
    names = _fields(type(tree))  # type: ignore[arg-type]
    if names is not None:
        return type(tree)(**{k: tree_map(f, getattr(tree, k), *(getattr(r, k) for r in rest)) for k in names})
    return f(tree, *rest)


@cache
def _fields(cls: type) -> tuple[str, ...] | None:
    return tuple(x.name for x in fields(cls)) if is_dataclass(cls) else None


def tree_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def where_rows(rows: Tensor, a: Any, b: Any) -> Any:
    """Tree `a` where the bool tensor `rows` holds, else tree `b`; `rows` [B] or [B, N] is widened to each leaf."""
    return tree_map(lambda x, y: x.where(_widened(rows, x), y), a, b)


def zero_where(rows: Tensor, tree: Any) -> Any:
    """The same tree, zero where the bool tensor `rows` holds: memory, where an agent starts."""
    return tree_map(lambda x: x.masked_fill(_widened(rows, x), 0), tree)


def _widened(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(rows.shape + (1,) * (x.dim() - rows.dim()))


def cat_groups(groups: tuple[str, ...], part: Callable[[str], Any], agents_at: int) -> Any:
    """The groups' tensors (or trees) side by side along the agents' dimension; none where they have none."""
    if len(groups) == 1:
        return part(groups[0])
    parts = [part(g) for g in groups]
    assert len({p is None for p in parts}) == 1, "groups that are bound together all have masks, or none has"
    return tree_map(lambda *xs: torch.cat(xs, agents_at), *parts)


def split_groups(spec: EnvSpec, groups: tuple[str, ...], x: Any, agents_at: int) -> dict[str, Any]:
    """The same the other way: a tree of all agents' tensors, a tree for each group."""
    if len(groups) == 1:
        return {groups[0]: x}
    sizes = [spec[g].n for g in groups]
    return {g: tree_map(lambda t, k=k: t.split(sizes, agents_at)[k], x) for k, g in enumerate(groups)}
