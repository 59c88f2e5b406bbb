"""Weights, gradients and moments spread over two real gloo ranks: one worker's training within rounding, half its bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_contracts.config import GovernConfig, TrainConfig
from data_contracts.errors import ConfigError
from stages.model.shards import own, ranks, shard
from stages.model.stored import store
from stages.technique.optimizer import Adam
from stages.technique.recompute import blocks_of
from stages.train import loop, publish, start
from stages.train.stage import STAGE, TrainSlice
from stages.workers.group import Group
from stages.workers.telling import function_of
from tests.local_work import work_for
from tests.stages.technique.setting import technique as technique_of
from tests.stages.technique.setting import windows
from tests.stages.train.small import House, llama, plan_of

FORK = multiprocessing.get_context("fork")
TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}
"""Of weights after the segment: the ranks' gradients are summed in another order, in float32."""


class Silent:
    def progress(self, done, total):
        pass

    def report(self, metrics):
        pass


def forked(entry, job, *, workers, device, folder, progress):
    """Run ranks as Ray does, by fork."""
    if not workers:
        return function_of(entry)(dict(job), Group(), Silent())
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)

    def live(rank):
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
        function_of(entry)(dict(job), Group(rank, workers, device), Silent())
        torch.distributed.destroy_process_group()

    processes = [FORK.Process(target=live, args=(rank,)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    if any(process.exitcode for process in processes):
        raise ChildProcessError(str([process.exitcode for process in processes]))
    return None


@pytest.fixture(autouse=True)
def ranks_by_fork(monkeypatch):
    monkeypatch.setattr(publish, "run_workers", forked)


def run(folder, house, **more):
    train = {"learning_rate": 5e-3, "warmup_steps": 0, "evaluations": 2, "snapshot_steps": 2, "epochs": 1.0}
    config = TrainSlice(seed=3, train=TrainConfig(**train, weight_decay=0.1), govern=GovernConfig())
    work = work_for(STAGE, folder, seed=3)
    summary = STAGE.run(config, house.inputs(**more), work)
    return summary, work, {name: work.artifact(name).ref.digest for name in sorted(work.opened)}


def house_of(folder, workers, technique=None, **plan):
    """Fourteen rows in windows of four: the last has two, so that a second rank has none of its own."""
    spread = {"workers": workers, "sharded": workers > 1, "accumulation": 1 if workers else 2}
    return House(folder, rows=14, plan={**spread, "technique": technique or {"method": "full"}, **plan})


def tensors_of(work, name):
    return load_file(work.artifact("checkpoint").folder / name)


@pytest.mark.parametrize(
    ("technique", "plan"),
    [({"method": "full"}, {}), ({"method": "lora", "r": 2}, {"recomputed_blocks": (0,), "loss_chunks": 2})],
    ids=["full", "lora-recomputed-chunked"],
)
def test_two_spread_workers_train_as_one(tmp_path, monkeypatch, technique, plan):
    alone, one, _ = run(tmp_path / "alone", house_of(tmp_path / "h1", 0, technique, **plan))
    house = house_of(tmp_path / "h2", 2, technique, **plan)
    spread, two, _ = run(tmp_path / "spread", house)
    assert spread.facts["steps"] == alone.facts["steps"] == 4
    assert spread.facts["flops"] == alone.facts["flops"]
    assert spread.facts["loss_after"] == pytest.approx(alone.facts["loss_after"], rel=1e-5)
    names = [
        "optimizer.safetensors",
        "model.safetensors" if technique["method"] == "full" else "adapter_model.safetensors",
    ]
    for name in names:
        first, second = (tensors_of(work, name) for work in (one, two))
        assert first.keys() == second.keys()
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, **TOLERANCE)
    told = json.loads((two.artifact("checkpoint").folder / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"]


def test_spread_workers_that_are_killed_resume_to_the_bit_and_their_checkpoint_starts_any_number(tmp_path, monkeypatch):
    house = house_of(tmp_path / "h2", 2)
    _, two, expected = run(tmp_path / "spread", house)
    real, made = loop._Segment._step, []

    def dying(self):
        made.append(1)
        if len(made) == 4:
            os._exit(9)
        real(self)

    monkeypatch.setattr(loop._Segment, "_step", dying)
    with pytest.raises(ChildProcessError):
        run(tmp_path / "killed", house)
    monkeypatch.setattr(loop._Segment, "_step", real)
    assert run(tmp_path / "killed", house)[2] == expected

    # the next segment takes each rank's part of whole weights and moments
    ends = [run(tmp_path / f"on{n}", house_of(tmp_path / f"h{n}", n), checkpoint=two.artifact("checkpoint"))[1]
            for n in (0, 2)]  # fmt: skip
    for key, value in tensors_of(ends[0], "optimizer.safetensors").items():
        torch.testing.assert_close(tensors_of(ends[1], "optimizer.safetensors")[key], value, **TOLERANCE)


def held_by(rank, meeting, answers):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = llama().train()
    shard(model, blocks_of(model), ranks("cpu"))
    optimizer = Adam(model, TrainConfig(), 1e-2)
    optimizer.step(windows(1)[0], 1e-2, clip=1.0, all_reduce=Group(rank, 2).sum_)
    found = {"weights": sum(own(item).nbytes for item in model.parameters()),
             "moments": sum(own(item).nbytes for item in optimizer.tensors().values())}  # fmt: skip
    (answers / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_each_of_two_ranks_holds_half_of_weights_and_moments(tmp_path):
    processes = [FORK.Process(target=held_by, args=(rank, tmp_path / "meeting", tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    whole_bytes = sum(item.nbytes for item in llama().parameters())
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"weights": whole_bytes // 2, "moments": whole_bytes}  # half of 4 P and of 8 P


@pytest.mark.parametrize(
    ("technique", "wrong", "named"),
    [
        ("badam", {}, "badam"),
        ("qlora", {}, "qlora"),
        ("full", {"workers": 1}, "one worker"),
        ("full", {"optimizer_states": "8bit"}, "moments in 8bit"),
        ("lora", {"influence": "segment"}, "influence"),
    ],
)
def test_what_cannot_be_spread_is_refused(technique, wrong, named):
    influence = wrong.pop("influence", None)
    job = SimpleNamespace(
        plan=plan_of(**{"workers": 2, "sharded": True} | wrong), train=TrainConfig(influence=influence)
    )
    with pytest.raises(ConfigError, match=named):
        start._refuse_sharding(job, technique_of(technique))
    start._refuse_sharding(SimpleNamespace(plan=plan_of(workers=2), train=TrainConfig()), technique_of("lora"))


def test_tensors_stored_one_by_one_are_the_bytes_that_the_library_writes(tmp_path):
    held = {
        "b.weight": torch.randn(3, 2), "a": torch.arange(5), "c": torch.randn(4).bfloat16(), "empty": torch.zeros(0, 2),
        "flag": torch.tensor([True]), "codes": torch.arange(7, dtype=torch.uint8), "one": torch.tensor(2.5).double(),
        "d": torch.randn(2, 2).T.half(), "i": torch.arange(3, dtype=torch.int32),
    }  # fmt: skip
    for metadata in (None, {"format": "pt"}):
        store(tmp_path / "ours", held, metadata)
        save_file({name: item.contiguous() for name, item in held.items()}, tmp_path / "theirs", metadata=metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
