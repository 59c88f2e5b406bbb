"""Many tasks, done by n processes that each prepared once: Ray actors, one task at a time.

Promises: results come in the order of the tasks, whoever did them; a task whose worker was lost (killed, out of memory,
its machine gone) goes to a new worker, `MOST_LOST` times and no more, and then `TransientError` names it; a worker's
typed error comes back as the same typed error and is not tried again; every worker ends with the block, and with this
process. A task must be safe to do twice: a worker that was given up may still be at it.

Plain actors, not Ray Data's pool: that one retries for ever unless told otherwise (`max_restarts` and
`max_task_retries` are -1), and counts for an actor, not for a task: bounded, it ends in Ray's error, which knows no
task. What passes are row numbers; blocks of an object store would help nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from data_contracts.errors import TransientError
from stages.workers.cluster import cluster, cpus_a_worker
from stages.workers.telling import error_of, function_of, told_of

MOST_LOST = 2
"""Workers that one task, or preparing, may lose."""


class _Worker:
    """The actor: opens once, then does what it is handed. What fails is told, not raised: an exception is a death."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._do: Callable[[Any], Any] | None = None

    def open(self, entry: str, job: dict[str, Any]) -> tuple[str, Any]:
        return _told(lambda: self._opened(entry, job))

    def do(self, task: Any) -> tuple[str, Any]:
        assert self._do is not None
        do = self._do
        return _told(lambda: do(task))

    def _opened(self, entry: str, job: dict[str, Any]) -> Any:
        prepared, self._do = function_of(entry)(job, self._resources)
        return prepared


def _told(action: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "done", action()
    except Exception as error:
        return "failed", told_of(error)


@contextmanager
def crew(
    entry: str, job: Mapping[str, Any], *, workers: int, threads: int, device: str, folder: Path
) -> Iterator[Crew]:
    """Give workers that end with the block, on the cluster at RAY_ADDRESS or on a local one.

    Args:
        entry: "package.module:function", called once a worker as `function(job, resources)`; returns what to say of
            preparing, and a function of a task. `resources` is an `ExitStack` that lives as long as the worker.
        job: plain data, as tasks, results and what is said are.
        threads: of a worker's libraries; torch is the entry's own affair.
        device: "cpu", or "cuda": one GPU a worker.
        folder: scratch of the stage.
    """
    with cluster(workers, folder):
        hired = Crew(entry, job, workers, threads, device)
        try:
            yield hired
        finally:
            hired.end()


class Crew:
    """Up to `workers` processes; see `crew`.

    Attributes:
        prepared: what the first worker that was ready said of preparing; None until then. All say the same.
        hired: workers that were started so far, lost ones and those in their place too.
    """

    def __init__(self, entry: str, job: Mapping[str, Any], workers: int, threads: int, device: str) -> None:
        import ray

        settings = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if device != "cuda":
            settings["CUDA_VISIBLE_DEVICES"] = ""
        self._actor: Any = ray.remote(_Worker).options(
            num_cpus=cpus_a_worker(ray.nodes(), workers),
            num_gpus=1 if device == "cuda" else 0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": settings},
        )
        self._entry, self._job, self._workers = entry, dict(job), workers
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int]] = {}
        self.prepared: Any = None
        self.hired = 0

    def do(self, tasks: Iterable[Any], name: Callable[[Any], str]) -> Iterator[Any]:
        """Yield the result of each task, in the order of `tasks`; the next call comes after the last result.

        Raises `TransientError` with `name(task)` for a task that lost its workers, a task's own `LazyTrainError`.
        """
        coming, waiting = enumerate(tasks), deque[int]()
        held: dict[int, Any] = {}  # tasks given out or waiting, by their place
        done: dict[int, Any] = {}
        lost: Counter[int] = Counter()
        yielded = 0
        while True:
            while len(waiting) <= self._workers and (item := next(coming, None)) is not None:
                held[item[0]] = item[1]
                waiting.append(item[0])
            self._hand_out(waiting, held)
            while yielded in done:
                yield done.pop(yielded)
                yielded += 1
            if not held:
                return
            place, found = self._next()
            if isinstance(found, Exception):
                lost[place] += 1
                if lost[place] > MOST_LOST:
                    raise _lost("preparing" if place < 0 else name(held[place]), lost[place], found)
                if place >= 0:
                    waiting.appendleft(place)
            elif place >= 0:
                del held[place]
                done[place] = found

    def _hand_out(self, waiting: deque[int], held: Mapping[int, Any]) -> None:
        """Give what waits to who is idle, and start a worker for what is left over."""
        while waiting and self._idle:
            worker, place = self._idle.pop(), waiting.popleft()
            self._busy[worker.do.remote(held[place])] = worker, place
        opening = sum(place < 0 for _, place in self._busy.values())
        while len(waiting) > opening and len(self._busy) + len(self._idle) < self._workers:
            worker = self._actor.remote()
            self._busy[worker.open.remote(self._entry, self._job)] = worker, -1
            self.hired += 1
            opening += 1

    def _next(self) -> tuple[int, Any]:
        """Wait for a worker; return the place of its task (-1: preparing) and the result, or the error it died of."""
        import ray
        from ray.exceptions import RayError

        (ready, *_), _ = ray.wait(list(self._busy), num_returns=1)
        worker, place = self._busy.pop(ready)
        try:
            kind, value = ray.get(ready)
        except RayError as error:
            ray.kill(worker)
            return place, error
        if kind == "failed":
            raise error_of(value) or RuntimeError(f"a worker failed:\n{value['parts'][0]}")
        self._idle.append(worker)
        if place < 0 and self.prepared is None:
            self.prepared = value
        return place, value

    def end(self) -> None:
        """End every worker."""
        import ray

        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            ray.kill(worker)
        self._idle, self._busy = [], {}


def _lost(task: str, count: int, error: Exception) -> TransientError:
    return TransientError(
        f"{task} is finished by one of {count} workers",
        f"each was lost at it: {' '.join(str(error).split())[:400] or type(error).__name__}",
        "run again: what is finished is kept; if memory ran out, take fewer workers or smaller batches",
    )
