"""Real gloo ranks: collectives leave the same bytes everywhere, and two ranks have the gradient of the whole window."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from stages.model.batch import collate
from stages.technique.step import optimizer_step, trainable
from stages.workers.group import Group
from tests.stages.technique.test_step import CLIP_OFF, Spy, by_hand, rows_of
from tests.stages.train.small import llama

FORK = multiprocessing.get_context("fork")


def on_ranks(count, meeting, function, *args):
    """Run `function(group, *args)` on forked gloo ranks and return what each returned."""
    answers = [meeting.parent / f"answer-{rank}.pt" for rank in range(count)]

    def live(rank):
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        torch.save(function(Group(rank, count), *args), answers[rank])
        torch.distributed.destroy_process_group()

    processes = [FORK.Process(target=live, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [torch.load(path, weights_only=True) for path in answers]


def share_of(group, rows, size):
    model = llama(dtype=torch.float64)
    cuts = [rows[start : start + size] for start in range(0, len(rows), size)]
    spy = Spy(model)
    result = optimizer_step(
        model, spy, [collate(cut) for cut in cuts[group.rank :: group.size]], clip=CLIP_OFF, all_reduce=group.sum_
    )
    return {"loss": result.loss, "norm": result.gradient_norm, **spy.seen}


@pytest.mark.parametrize(("ranks", "size"), [(1, 3), (2, 3), (2, 7)])
def test_ranks_share_the_gradient_of_the_whole_window(tmp_path, ranks, size):
    rows = rows_of(7)
    loss, expected = by_hand(llama(dtype=torch.float64), rows)
    answers = on_ranks(ranks, tmp_path / "meeting", share_of, rows, size)
    for found in answers:
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert set(found) - {"loss", "norm"} == set(trainable(llama()))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)
            assert torch.equal(found[name], answers[0][name])


def speak(group):
    many = [torch.full((3, 2), group.rank + 1.0), torch.arange(4, dtype=torch.float64), torch.ones(0)]
    group.sum_(many)
    parts = group.gather(torch.tensor([group.rank], dtype=torch.uint8))
    group.wait()
    return {"sum": many, "parts": parts, "agreed": group.agree([float(group.rank), 0.5])}


def test_every_rank_hears_sums_parts_and_the_first_ranks_word(tmp_path):
    for heard in on_ranks(2, tmp_path / "meeting", speak):
        assert heard["sum"][0].tolist() == [[3.0, 3.0]] * 3
        assert heard["sum"][1].tolist() == [0.0, 2.0, 4.0, 6.0]
        assert [part.tolist() for part in heard["parts"]] == [[0], [1]]
        assert heard["agreed"] == [0.0, 0.5]


def test_one_rank_needs_no_process_group():
    heard = speak(Group())
    assert heard["sum"][0].tolist() == [[1.0, 1.0]] * 3
    assert heard["agreed"] == [0.0, 0.5]
