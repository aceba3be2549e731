"""What several tests beside PyTorch need."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch in one thread: operations are small here, and more would wait for other tests."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
