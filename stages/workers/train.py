"""Running a function on n ranks: in this process (0), or as a Ray Train worker group (1 and more).

Ray carries metrics and barriers only; everything that must survive lies in files that the function writes. What passes
to a rank is plain data and the function's dotted name. A rank's typed error comes back as the same typed error, a rank
that dies as `TransientError`: running again goes on from the files.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_contracts.errors import LazyTrainError, TransientError
from stages.workers.cluster import cluster, cpus_a_worker
from stages.workers.group import Group
from stages.workers.telling import error_of, function_of, told_of

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

FAILURE, PROGRESS, MEETING = "failure.json", "progress.json", "meeting"
POLL_SECONDS = 0.5


def run_workers(
    entry: str, job: Mapping[str, Any], *, workers: int, device: str, folder: Path, progress: Progress
) -> None:
    """Run `entry(job, group, channel)` on every rank and return when all have returned.

    Args:
        entry: "package.module:function"; imported on each rank.
        job: plain JSON data.
        workers: 0 runs it here, without ray; n starts n ranks on the cluster at RAY_ADDRESS, or on a local one.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU a rank).
        folder: scratch that every rank can reach.
        progress: called here, from time to time.

    Raises the rank's own `LazyTrainError`, or `TransientError` where a rank or the cluster was lost.
    """
    if workers == 0:
        function_of(entry)(dict(job), Group(device=device), _Here(progress))
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILURE).unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
    with cluster(workers, folder) as alone, _watched(folder / PROGRESS, progress):
        _fit(entry, job, workers, device, folder, alone)


class _Here:
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def report(self, metrics: Mapping[str, float]) -> None:
        """Nobody else listens."""


class _Ray:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def progress(self, done: int, total: int) -> None:
        if self._rank == 0:
            _write(self._folder / PROGRESS, {"done": done, "total": total})

    def report(self, metrics: Mapping[str, float]) -> None:
        from ray import train

        train.report(dict(metrics))


def _rank_main(config: dict[str, Any]) -> None:
    """One Ray worker's life; the process group stands when it is called."""
    from ray import train

    context = train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    device = f"cuda:{context.get_local_rank()}" if config["device"] == "cuda" else "cpu"
    if config["device"] == "cuda":
        from ray.train.torch import get_device

        device = str(get_device())
    try:
        function_of(config["entry"])(config["job"], Group(rank, context.get_world_size(), device), _Ray(folder, rank))
    except LazyTrainError as error:
        _write(folder / FAILURE, told_of(error))
        raise
    except Exception as error:
        if not (folder / FAILURE).is_file():  # the first rank to fail tells why; the others lose their partner
            _write(folder / FAILURE, told_of(error))
        raise


def _fit(entry: str, job: Mapping[str, Any], workers: int, device: str, folder: Path, alone: Path | None) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from stages.workers.rendezvous import meeting_at

    storage = folder / "ray_train"
    backend = "nccl" if device == "cuda" else "gloo"
    trainer = TorchTrainer(
        _rank_main,
        train_loop_config={"entry": entry, "job": dict(job), "device": device, "folder": str(folder)},
        torch_config=TorchConfig(backend=backend) if alone is None else meeting_at(alone / MEETING, backend),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=device == "cuda",
            resources_per_worker={"CPU": cpus_a_worker(ray.nodes(), workers)},
        ),
        run_config=RunConfig(
            name=f"segment-{uuid.uuid4().hex}",  # a finished run name would return its old result
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    try:
        trainer.fit()
    except (TrainingFailedError, RayError) as error:
        raise _failure(folder, error) from error
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _failure(folder: Path, error: Exception) -> Exception:
    """Return the error that a rank wrote down, else that it was lost."""
    if (folder / FAILURE).is_file():
        told = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
        known = error_of(told)
        if known is not None:
            return known
        if "DistBackendError" not in told["parts"][0] and "Connection" not in told["parts"][0]:
            return RuntimeError(f"a training worker failed:\n{told['parts'][0]}")
    return TransientError(
        "every training worker lives until the segment's end",
        f"a worker or its cluster was lost: {' '.join(str(error).split())[:400] or type(error).__name__}",
        "run again: it goes on from the last snapshot; if memory ran out, plan a smaller micro-batch",
    )


@contextmanager
def _watched(path: Path, progress: Progress) -> Iterator[None]:
    """Pass on what rank 0 writes about its progress, until the block ends."""
    ended = threading.Event()

    def watch() -> None:
        last = -1
        while True:
            final = ended.wait(POLL_SECONDS)
            if path.is_file():
                told = json.loads(path.read_text(encoding="utf-8"))
                if told["done"] != last:
                    last = told["done"]
                    progress(told["done"], told["total"])
            if final:
                return

    thread = threading.Thread(target=watch, name="training-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value), encoding="utf-8")
    os.replace(scratch, path)
