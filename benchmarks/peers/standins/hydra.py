"""`@hydra.main(...)`, which leaves the function as it is."""

from collections.abc import Callable
from typing import Any


def main(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function
