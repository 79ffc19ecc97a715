import pytest
import torch

from shoal.ops.compiler import CannotFuse, compiler

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("compiler"):
        try:
            compiler()
        except CannotFuse as why:
            pytest.skip(str(why))
