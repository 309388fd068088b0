import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The problems are small: a second thread only waits."""
    torch.set_num_threads(1)
