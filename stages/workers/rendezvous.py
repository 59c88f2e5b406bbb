"""How the ranks of a local cluster find each other: through a file, so that no port is opened to the network.

torch's own meeting point is a server that listens on every interface. On one machine a file does as well. Ray Train's
torch backend knows no files, so its start is repeated here with one; everything else of it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend


class _FileBackend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _setup_torch_process_group,
                    backend=backend_config.backend,
                    world_rank=rank,
                    world_size=len(worker_group),
                    init_method=backend_config.init_method,
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(len(worker_group))
            ]
        )


@dataclass
class FileRendezvous(TorchConfig):
    """A torch backend whose ranks meet in the file that `init_method` names (a `file:` URI, not there yet)."""

    @property
    def backend_cls(self) -> type[_FileBackend]:
        """The backend that Ray Train starts."""
        return _FileBackend


def meeting_at(path: Path, backend: str) -> FileRendezvous:
    """Return the configuration of ranks that meet at `path`; a file that a killed attempt left is removed."""
    path.unlink(missing_ok=True)
    return FileRendezvous(backend=backend, init_method=path.resolve().as_uri())
