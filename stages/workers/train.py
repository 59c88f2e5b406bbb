"""Running a function on n ranks: in this process (0), or as a Ray Train worker group (1 and more).

Ray carries metrics and barriers only; everything that must survive lies in files that the function writes. What passes
to a rank is plain data and the function's dotted name. A rank's typed error comes back as the same typed error, a rank
that dies as `TransientError`: running again goes on from the files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from data_contracts import errors
from data_contracts.errors import LazyTrainError, TransientError
from data_contracts.records import OUTSIDE_FILE, OUTSIDE_PREFIX
from stages.workers.group import Channel, Group

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""Whether a node may have others beside it, whatever the name says. Where it may not, Ray's processes know it by
127.0.0.1 and most of them listen there alone; else every port of a local cluster is open to the network."""
FAILURE, PROGRESS, MEETING = "failure.json", "progress.json", "meeting"
POLL_SECONDS = 0.5
LONGEST_ROOT = 36
"""Characters of Ray's folder: its socket's path must stay within the 107 that a unix socket may have."""


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
        _function(entry)(dict(job), Group(device=device), _Here(progress))
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILURE).unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)
    with _cluster(workers, device, folder) as alone, _watched(folder / PROGRESS, progress):
        _fit(entry, job, workers, device, folder, alone)


def _function(entry: str) -> Callable[[dict[str, Any], Group, Channel], None]:
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


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
        _function(config["entry"])(config["job"], Group(rank, context.get_world_size(), device), _Ray(folder, rank))
    except LazyTrainError as error:
        _write(
            folder / FAILURE,
            {"kind": type(error).__name__, "parts": [error.promised, error.found, error.remedy]},
        )
        raise
    except Exception:
        if not (folder / FAILURE).is_file():  # the first rank to fail tells why; the others lose their partner
            _write(folder / FAILURE, {"kind": "", "parts": [traceback.format_exc()]})
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
            resources_per_worker={"CPU": _cpus_a_rank(ray.nodes(), workers)},
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


def _cpus_a_rank(nodes: Sequence[Mapping[str, Any]], workers: int) -> int:
    """Return the CPUs that every rank can have wherever it is put, at least 1; torch uses as many threads."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    useful = [count for count in cpus if count > 0]
    return max(1, min(useful) // math.ceil(workers / len(useful))) if useful else 1


def _failure(folder: Path, error: Exception) -> Exception:
    """Return the error that a rank wrote down, else that it was lost."""
    if (folder / FAILURE).is_file():
        told = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
        kind = getattr(errors, told["kind"], None) if told["kind"] else None
        if kind is not None:
            return kind(*told["parts"])
        if "DistBackendError" not in told["parts"][0] and "Connection" not in told["parts"][0]:
            return RuntimeError(f"a training worker failed:\n{told['parts'][0]}")
    return TransientError(
        "every training worker lives until the segment's end",
        f"a worker or its cluster was lost: {' '.join(str(error).split())[:400] or type(error).__name__}",
        "run again: it goes on from the last snapshot; if memory ran out, plan a smaller micro-batch",
    )


@contextmanager
def _cluster(workers: int, device: str, folder: Path) -> Iterator[Path | None]:
    """A connection to Ray: the caller's, else the cluster at RAY_ADDRESS, else a local one that ends here.

    Gives the folder of a local one, None for another.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.setdefault(*LOOPBACK)
    import ray

    if ray.is_initialized():
        yield None
        return
    root = None if address else _short_folder(folder)
    try:
        if address:
            ray.init(address=address, log_to_driver=False)
        else:
            ray.init(
                num_cpus=max(workers, os.cpu_count() or 1),  # ranks may share a core; the controller takes none
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=str(root),
                runtime_env={"env_vars": {"PYTHONPATH": _import_path(), "PYTHONSAFEPATH": "1"}},
            )
        yield root
    finally:
        ray.shutdown()
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            (folder / OUTSIDE_FILE).unlink(missing_ok=True)


def _short_folder(folder: Path) -> Path:
    """Return a new folder for Ray's sockets, and remove the one that a killed attempt left."""
    note = folder / OUTSIDE_FILE
    if note.is_file():
        shutil.rmtree(note.read_text(encoding="utf-8"), ignore_errors=True)
    parent = folder.resolve() if len(str(folder.resolve())) < LONGEST_ROOT - 12 else Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_ROOT - 12:
        parent = Path("/tmp")  # noqa: S108 - a private folder is made in it
    root = Path(tempfile.mkdtemp(prefix=OUTSIDE_PREFIX, dir=parent))
    note.write_text(str(root), encoding="utf-8")
    return root


def _import_path() -> str:
    """Return the PYTHONPATH under which a worker finds this project."""
    own = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(part for part in (own, os.environ.get("PYTHONPATH", "")) if part)


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
