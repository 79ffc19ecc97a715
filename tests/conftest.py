import atexit
import os
import shutil
import tempfile

import pytest
import torch

from shoal.kernels.compiler import CannotFuse, compiler

torch.set_num_threads(1)
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="shoal-config-")  # the key that runs are signed with is the tests' own
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("compiler"):
        try:
            compiler()
        except CannotFuse as why:
            pytest.skip(str(why))
