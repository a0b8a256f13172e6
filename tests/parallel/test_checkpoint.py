"""Checkpoints: resumed to the last bit, read by other layouts, never half written, damage named."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.parallel.training import build, data, full

from shardwise import Checkpoints, clip_grad_norm_, parallelize, param_groups
from shardwise.errors import InputError
from shardwise.parallel.checkpoint import export_model
from shardwise.testing import ranks, shard

LAYOUTS = {  # ranks: (ddp, domain, options)
    1: (1, 1, {}),
    3: (1, 3, {}),
    4: (4, 1, {"fsdp": True}),
}


def _loop(world, folder, *, ddp, domain, first, last, save_at=(), wait=True, **options):
    """Losses of steps `first`..`last`, resumed from the folder if it has a checkpoint; and the trained state."""
    mesh = world.make_mesh((ddp, domain), ("ddp", "domain"))
    model = parallelize(build(torch.float32, seed=9), mesh, **options)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    checkpoints = Checkpoints(folder)
    torch.manual_seed(0)
    found = checkpoints.load(model, optimizer, scheduler)
    assert (found.step if found else 0) == first
    position = found.data["sample"] if found else 0
    losses = []
    for step in range(first, last):
        x, y = (part.chunk(ddp)[mesh.get_local_rank("ddp")] for part in data(torch.float32))
        x = x.roll(position, 0) + 0.1 * F.dropout(torch.ones(1), 0.5)  # order and noise: both must resume
        loss = F.mse_loss(model(shard(x, mesh["domain"], dim=2)), y)
        loss.backward()
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        position += 1
        losses.append(float(full(loss)))
        if step + 1 in save_at:
            checkpoints.save(step + 1, model, optimizer, scheduler, data={"sample": position}, wait=wait)
    checkpoints.wait()
    return losses, model, optimizer


def _state(model, optimizer):
    plain = getattr(model, "module", model)
    result = {}
    for name, p in plain.named_parameters():
        result[name] = full(p)
        result |= {f"{name}.{key}": full(value) for key, value in optimizer.state[p].items() if isinstance(value, torch.Tensor)}
    return result


@pytest.mark.parametrize("fsdp", [False, True])
@ranks(4, processes=True, timeout=120)
def test_resumed_run_has_the_same_losses_to_the_last_bit(world, tmp_path, fsdp):
    options = {"ddp": 2, "domain": 2, "fsdp": fsdp}
    through, *_ = _loop(world, tmp_path / "a", first=0, last=6, save_at=(3,), wait=False, **options)
    resumed, *_ = _loop(world, tmp_path / "a", first=3, last=6, **options)
    assert resumed == through[3:]


@ranks(4, processes=True, timeout=120)
def _save(world, folder, expected):
    _, model, optimizer = _loop(world, folder, ddp=2, domain=2, fsdp=True, spatial_params="auto", first=0, last=2, save_at=(2,))
    state = _state(model, optimizer)
    uneven = shard(torch.arange(22.0).view(11, 2), world.make_mesh((4,), ("domain",)), dim=0, sizes=(5, 0, 1, 5))
    Checkpoints(folder).save(2, model, optimizer, data={"sample": 2}, extra={"field": uneven})
    export_model(model, f"{folder}/model.safetensors")
    export_model(model, f"{folder}/model.pt")
    if world.rank == 0:
        torch.save(state, expected)


def _load(world, folder, expected):
    ddp, domain, options = LAYOUTS[world.size]
    mesh = world.make_mesh((ddp, domain), ("ddp", "domain"))
    model = parallelize(build(torch.float32, seed=5), mesh, **options)
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.5)
    field = shard(torch.zeros(11, 2), world.make_mesh((world.size,), ("domain",)), dim=1)
    found = Checkpoints(folder).load(model, optimizer, extra={"field": field})
    assert (found.step, found.data) == (2, {"sample": 2})
    want = torch.load(expected)
    have = _state(model, optimizer)
    assert have.keys() == want.keys()
    assert [name for name in want if not torch.equal(have[name], want[name])] == []
    assert {group["lr"] for group in optimizer.param_groups} == {0.005}
    assert torch.equal(field.full_tensor(), torch.arange(22.0).view(11, 2))


@ranks(1, processes=True)
def _load_on_1(world, folder, expected):
    _load(world, folder, expected)


@ranks(3, processes=True)
def _load_on_3(world, folder, expected):
    _load(world, folder, expected)


@ranks(4, processes=True)
def _load_on_4(world, folder, expected):
    _load(world, folder, expected)


def test_saved_on_2_x_2_and_read_on_other_layouts(tmp_path):
    folder, expected = str(tmp_path), str(tmp_path / "expected.pt")
    _save(folder, expected)
    for load in (_load_on_1, _load_on_3, _load_on_4):
        load(folder, expected)
    from safetensors.torch import load_file

    want = torch.load(expected)
    for state in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        model = build(torch.float32, seed=1)
        model.load_state_dict(state)
        assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def test_damage_is_named_and_the_last_good_one_is_read(tmp_path):
    model = build(torch.float32)
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model.head.bias.fill_(step)
        checkpoints.save(step, model)
    assert checkpoints.steps() == [2, 3, 4]
    _flip(next((tmp_path / "step_00000004").glob("*.distcp")))
    truncated = tmp_path / "step_00000003" / "rank_00000.pt"
    truncated.write_bytes(truncated.read_bytes()[:-7])
    with pytest.raises(InputError, match=r"__0_0\.distcp: its checksum is not the one"):
        checkpoints.load(model, step=4)
    with pytest.raises(InputError, match=r"rank_00000\.pt: \d+ bytes, saved were \d+"):
        checkpoints.load(model, step=3)
    with pytest.raises(InputError, match=r"no such checkpoint\ntry: one of \[2, 3, 4\]"):
        checkpoints.load(model, step=7)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert checkpoints.load(model).step == 2
    assert [name for name in ("__0_0.distcp", "rank_00000.pt") if any(name in str(w.message) for w in told)] == [
        "__0_0.distcp",
        "rank_00000.pt",
    ]
    assert model.head.bias.unique().tolist() == [2.0]


def test_interrupted_save_leaves_the_last_one(tmp_path, monkeypatch):
    model = build(torch.float32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(RuntimeError, match="killed here"):
        checkpoints.save(2, model)
    monkeypatch.undo()
    assert (tmp_path / ".step_00000002.partial").exists()
    again = Checkpoints(tmp_path)
    assert again.load(model).step == 1
    again.save(3, model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_background_save_is_of_the_moment_it_was_asked_for(tmp_path):
    model = build(torch.float32)
    checkpoints = Checkpoints(tmp_path)
    before = model.head.weight.detach().clone()
    checkpoints.save(1, model, wait=False)
    with torch.no_grad():
        model.head.weight.zero_()
    assert checkpoints.load(model).step == 1
    assert torch.equal(model.head.weight, before)


def test_killed_ranks_resume_with_the_same_losses():
    script = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"
    command = [sys.executable, str(script), "--kills", "3", "--ranks", "2", "--steps", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills")
