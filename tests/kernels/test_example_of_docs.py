"""The launch that docs/how_it_works.md shows writes what it says, in PyTorch, that it does."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"


def test_the_launch_and_its_equivalent(device):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example.count("assert ") == 4
    req_to_token = torch.randperm(8 * 4096, device=device).int().view(8, 64, 64)[..., :1] * 64
    names = {
        "torch": torch,
        "seq_lens": torch.tensor([3000, 700, 1], device=device),
        "req_pool_indices": torch.tensor([5, 2, 7], device=device),
        "req_to_token": (req_to_token + torch.arange(64, device=device)).int().view(8, 4096),
    }
    exec(example, names)
