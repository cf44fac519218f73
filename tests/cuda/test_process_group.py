"""Ranks with GPUs: through nccl where each has its own, through gloo where they share one."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAME = 1e-9  # float64: sums over ranks come in another order
CONFIG = """
rounds = 12
[data]
source = "gaussians"
n = 300
classes = 3
clients = 9
partition = "dirichlet"
alpha = 0.7
[model]
name = "mlp"
hidden = [6]
[algorithm]
name = "scaffold"
[ensemble]
modes = 2
strata = 2
clients_per_round = 4
[engine]
device = "cuda"
dtype = "float64"
"""


def test_two_ranks_do_what_one_does(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for before, out in (([], "one"), (ranks, "two")):
        command = [sys.executable, *before, "-m", "fedensemble", "run", "config.toml", "--out", out]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    assert ("share a GPU" in done.stdout) == (torch.cuda.device_count() < 2)
    one, two = (load_file(tmp_path / out / "modes.safetensors") for out in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=SAME, atol=SAME)


def test_sums_through_nccl():
    """In a job of one process, as nccl refuses two on one GPU: what is added up comes back, and
    signals are heard.
    """
    code = """
import torch, torch.distributed as dist
from fedensemble.engines.distributed.process_group import ProcessGroup
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
ranks = ProcessGroup()
ranks.size, ranks._nccl_group = 2, dist.new_group(backend="nccl")
given = torch.arange(6.0, device="cuda").reshape(2, 3)
assert torch.equal(ranks.sum(given.clone()), given)
assert torch.equal(ranks.sum(torch.arange(3)), torch.arange(3))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
