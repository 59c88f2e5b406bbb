"""How much memory the work really took: the process's high-water mark, or the accelerator's.

On Linux the kernel keeps the largest resident size (VmHWM); it can be reset where the process may write its own
`clear_refs`, otherwise only a rise above the old mark is seen. Nothing is predicted here.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from types import TracebackType

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2**20  # mallopt(3)
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size to the current one


def peak_bytes() -> int:
    """Return the largest memory held so far: CUDA's allocator where there is a device, else the resident size."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the process's largest resident size since its start or the last reset, bytes."""
    if _STATUS.exists():
        return _status("VmHWM")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def resident_bytes() -> int:
    """Return the process's resident size now, bytes; the peak where the system does not tell."""
    return _status("VmRSS") if _STATUS.exists() else peak_resident_bytes()


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


def reset_peak() -> bool:
    """Set the high-water mark to what is held now; return whether the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def return_freed_memory() -> bool:
    """Make the C allocator give freed blocks of 1 MiB and more back to the system; return whether it can (glibc).

    By default glibc raises that limit to 32 MiB as it sees large blocks freed, and keeps what lies below in a heap that
    fragments: training a 17M-parameter Llama with LoRA and recomputation held 410 MiB more than its tensors, against 6
    MiB with the limit fixed. The price is fresh pages: 3 % of a step's CPU time at 135M parameters, 35 % at 17M.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK))
    except (AttributeError, OSError):
        return False


class PeakMeter:
    """A context that measures the peak of what runs inside.

    Attributes (after the context):
        bytes: the largest memory held inside, the process's own included.
        before: memory held at the start.
        exact: False where the mark could not be reset, so that an earlier, higher peak hides this one.
    """

    def __init__(self) -> None:
        self.bytes, self.before, self.exact = 0, 0, False

    def __enter__(self) -> PeakMeter:
        self.exact = reset_peak()
        self.before = torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bytes = peak_bytes()
