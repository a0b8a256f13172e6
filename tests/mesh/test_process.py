"""Places from the environments of launchers, and the manager in real processes."""

import os
import subprocess
import sys

import pytest

from shardwise.errors import InputError
from shardwise.mesh.process import DistributedManager, Place, place_from_environment
from shardwise.testing import ranks

MEET = {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Place()),
        ({"WORLD_SIZE": "1"}, Place()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
        ({"RANK": "3", "WORLD_SIZE": "8", **MEET}, Place(rank=3, world_size=8, address="node1", port=4000)),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "gpu-[07-09,12],x1", "MASTER_PORT": "1"},
            Place(rank=5, world_size=8, address="gpu-07", port=1),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NPROCS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "MASTER_PORT": "1"},
            Place(rank=1, world_size=2, address="10.0.0.1", port=1),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_PORT": "1"},
            Place(rank=1, world_size=2, address="127.0.0.1", port=1),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", **MEET}, Place(rank=2, world_size=4, address="node1", port=4000)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", **MEET},
            Place(rank=1, world_size=2, address="node1", port=4000),
        ),
    ],
)
def test_place(env, expected):
    assert place_from_environment(env) == expected


def test_port_is_made_from_the_job_and_equal_on_all_ranks():
    def port(rank, job):
        env = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": str(job)}
        return place_from_environment(env).port

    assert port(0, 77) == port(1, 77) != port(0, 78)
    assert all(20000 <= port(0, job) < 30000 for job in range(20))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "4"}, "WORLD_SIZE is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "0 to 3"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK=one"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "set MASTER_ADDR"),
    ],
)
def test_half_given_places_are_refused(env, message):
    with pytest.raises(InputError, match=message):
        place_from_environment(env)


@ranks(4)
def test_manager_adopts_the_process_group(world):
    DistributedManager.initialize()
    manager = DistributedManager()
    assert (manager.rank, manager.world_size, manager.local_rank, manager.device.type) == (world.rank, 4, world.rank, "cpu")
    mesh = manager.initialize_mesh(mesh_shape=(-1, 2), mesh_dim_names=["ddp", "domain"])
    assert mesh.shape == (2, 2)
    assert mesh.mesh_dim_names == ("ddp", "domain")
    assert manager.get_mesh_group(mesh).size() == 4
    assert manager.get_mesh_group(mesh["domain"]) is mesh["domain"].get_group()


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 3), ("a", "b"), "multiply to 6, the world has 4 ranks"),
        ((-1, 3), ("a", "b"), "3 does not divide the 4 ranks"),
        ((-1, -1), ("a", "b"), "one of them may be -1"),
        ((0, 4), ("a", "b"), "sizes are positive"),
        ((4,), ("a", "b"), "1 sizes and 2 names"),
        ((2, 2), ("a", "a"), "a name stands twice"),
    ],
)
@ranks(4)
def test_impossible_meshes_are_refused_with_the_numbers(world, shape, names, message):
    with pytest.raises(InputError, match=message):
        DistributedManager().initialize_mesh(shape, names)


def test_manager_before_initialize_says_what_to_do(monkeypatch):
    monkeypatch.setattr(DistributedManager, "is_initialized", staticmethod(lambda: False))
    with pytest.raises(InputError, match=r"DistributedManager\.initialize\(\) first"):
        DistributedManager()


SCRIPT = """
import torch, torch.distributed as dist
from shardwise.mesh.process import DistributedManager
for turn in range(2):
    DistributedManager.initialize()
    DistributedManager.initialize()
    manager = DistributedManager()
    x = torch.ones(1) * (manager.rank + 1)
    dist.all_reduce(x, group=manager.get_mesh_group(manager.initialize_mesh((-1,), ("domain",))))
    print(turn, manager.rank, manager.world_size, manager.local_rank, DistributedManager.is_initialized(), int(x), flush=True)
    DistributedManager.cleanup()
    DistributedManager.cleanup()
    assert not DistributedManager.is_initialized()
"""
LAUNCHER_WORDS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "MPI_")


def clean_environment():
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_WORDS)}
    return {**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_alone_without_a_launcher():
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0 0 1 0 True 1", "1 0 1 0 True 1"]


SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_two_processes_meet_without_torchrun(launcher):
    processes = []
    for rank in range(2):
        if launcher == "slurm":
            env = {**SLURM, "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        else:
            env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": f"job-{os.getpid()}"}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**clean_environment(), **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.splitlines() == [f"0 {rank} 2 {rank} True 3", f"1 {rank} 2 {rank} True 3"]


def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "--redirects=1", f"--log-dir={tmp_path}", str(script)]
    result = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    outputs = [path.read_text().splitlines() for path in tmp_path.rglob("stdout.log")]
    assert sorted(outputs) == [[f"{turn} {rank} 2 {rank} True 3" for turn in range(2)] for rank in range(2)]
