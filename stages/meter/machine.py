"""What this machine is: device, cores, memory, low-precision units, accelerators, disk. Imports no torch.

Read from the system alone, so that the command can tell it in milliseconds. Whether torch was built for the device is
for who loads torch to find out.
"""

from __future__ import annotations

import os
import platform
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_kind() -> Literal["cpu", "cuda"]:
    """Return "cuda" where an NVIDIA device is present and visible, else "cpu"."""
    return "cuda" if accelerators() else "cpu"


def describe(folder: Path | None = None) -> dict[str, Any]:
    """Return the facts of this machine; `folder` is where disk space is asked for (default: the current one)."""
    memory = psutil.virtual_memory()
    return {
        "device": device_kind(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": usable_cores(),
        "memory_bytes": min(memory.total, _cgroup_limit() or memory.total),
        "memory_available_bytes": available_bytes(),
        "cpu": _cpu_name(),
        "fast_bfloat16": cpu_has_fast_bfloat16(),
        "accelerators": accelerators(),
        "disk_free_bytes": shutil.disk_usage(folder or Path.cwd()).free,
    }


def usable_cores() -> int:
    """Return the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """Return the memory that can still be taken: the system's, or a container's limit where that is lower."""
    limit = _cgroup_limit()
    free = psutil.virtual_memory().available
    return free if limit is None else max(0, min(free, limit - psutil.Process().memory_info().rss))


def cpu_has_fast_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX); without it bfloat16 is slower."""
    return bool({"avx512_bf16", "amx_bf16"} & _cpu_flags())


@lru_cache(maxsize=1)
def accelerators() -> tuple[dict[str, Any], ...]:
    """Return name, memory and compute capability of each visible NVIDIA device; empty where there is no driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_accelerator(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _accelerator(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.free),
        "capability": ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
    }


def _cgroup_limit() -> int | None:
    for path in _LIMITS:
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            if text.isdigit() and int(text) < 1 << 60:
                return int(text)
    return None


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    for line in _cpu_lines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _cpu_name() -> str:
    for line in _cpu_lines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_lines() -> list[str]:
    return _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUINFO.is_file() else []
