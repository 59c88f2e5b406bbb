"""How much energy the machine spent, where it tells: RAPL's counters for processors and memory, NVML's for GPUs.

Counters are of the whole machine, whoever works on it. A counter that this process may not read is none (Linux lets
only root read RAPL since 2020, CVE-2020-8694). RAPL wraps within minutes to hours, so it must be read more often than
that. An estimate where nothing is told is left to others. Sources: Linux's Documentation/power/powercap, NVML's
nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was loaded) and nvmlDeviceGetPowerUsage (mW).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.meter.machine import accelerators

POWERCAP = Path("/sys/class/powercap")
ZONES = ("package", "dram")
"""RAPL zones that are counted: a package holds its cores and its graphics, memory is beside it."""


@dataclass(frozen=True)
class Counter:
    """A counter of energy.

    Args:
        read: the joules it stands at.
        wrap: joules after which it begins anew; 0 where it never does.
    """

    read: Callable[[], float]
    wrap: float = 0.0


class EnergyMeter:
    """Adds up what `counters` count from the moment it is made; may be read from several threads.

    Args:
        counters: None takes those that the machine has.
    """

    def __init__(self, counters: Sequence[Counter] | None = None) -> None:
        self._counters = tuple(machine_counters() if counters is None else counters)
        self._last = [counter.read() for counter in self._counters]
        self._joules, self._lock = 0.0, threading.Lock()

    @property
    def tells(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._counters)

    def joules(self) -> float:
        """Return the joules so far."""
        with self._lock:
            for place, counter in enumerate(self._counters):
                now = counter.read()
                grown = now - self._last[place]
                self._joules += grown + counter.wrap if grown < 0 else grown
                self._last[place] = now
            return self._joules


def machine_counters() -> list[Counter]:
    """Return what this machine lets this process read; nothing where it tells none."""
    return rapl_counters(POWERCAP) + (nvml_counters() if accelerators() else [])


def rapl_counters(root: Path) -> list[Counter]:
    """Return the counters under a powercap folder (intel-rapl:0, intel-rapl:0:2, …; AMD's have the same names)."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            if not (zone / "name").read_text(encoding="ascii").startswith(ZONES):
                continue
            wrap = int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
            counter = Counter(lambda file=zone / "energy_uj": int(file.read_text(encoding="ascii")) / 1e6, wrap / 1e6)  # type: ignore[misc]
            counter.read()
        except OSError:  # root alone may read it
            continue
        found.append(counter)
    return found


def nvml_counters() -> list[Counter]:
    """Return a counter for each visible GPU: its own, or its power over the time between readings."""
    import pynvml

    pynvml.nvmlInit()  # counted by NVML, and let go with the process
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [int(number) for number in shown.split(",") if number.strip().isdigit()]
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in chosen or range(pynvml.nvmlDeviceGetCount())]
    return [gpu_counter(pynvml, handle) for handle in handles]


def gpu_counter(nvml: Any, handle: Any) -> Counter:
    """Return the counter of one GPU; `nvml` is the module pynvml."""
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:  # before Volta
        return Counter(_Integral(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, time.monotonic).read)
    return Counter(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


class _Integral:
    """Watts over time, by trapezoids between readings."""

    def __init__(self, watts: Callable[[], float], clock: Callable[[], float]) -> None:
        self._watts, self._clock = watts, clock
        self._at, self._power, self._joules = clock(), watts(), 0.0

    def read(self) -> float:
        now, power = self._clock(), self._watts()
        self._joules += (now - self._at) * (power + self._power) / 2
        self._at, self._power = now, power
        return self._joules
