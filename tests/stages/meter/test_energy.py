"""Energy as the kernel and the driver tell it: units, wrapping counters, zones that are counted once, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.meter.energy import Counter, EnergyMeter, _Integral, gpu_counter, rapl_counters


def zone(root: Path, name: str, kind: str, microjoules: int, wrap: int = 262_143_328_850) -> Path:
    """Lay a RAPL zone out as Linux does."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{kind}\n")
    (folder / "max_energy_range_uj").write_text(f"{wrap}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_memory_are_counted_and_what_lies_inside_a_package_is_not_counted_again(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 5_000_000)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 500_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000)  # the same package by another way
    meter = EnergyMeter(rapl_counters(tmp_path))
    assert meter.joules() == 0
    package.write_text("3500000\n")
    memory.write_text("5250000\n")
    cores.write_text("9000000\n")
    assert meter.joules() == pytest.approx(2.5 + 0.25)
    assert meter.joules() == pytest.approx(2.75)


def test_a_counter_that_began_anew_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, wrap=10_000_000)
    meter = EnergyMeter(rapl_counters(tmp_path))
    package.write_text("1500000\n")
    assert meter.joules() == pytest.approx(2.5)


def test_a_machine_that_tells_nothing_or_only_to_root_has_no_meter(tmp_path: Path) -> None:
    unreadable = zone(tmp_path / "there", "intel-rapl:0", "package-0", 1)
    unreadable.unlink()
    unreadable.mkdir()  # reading it fails whoever asks, as the kernel's file does for all but root
    assert rapl_counters(tmp_path / "there") == rapl_counters(tmp_path / "absent") == []
    silent = EnergyMeter([])
    assert (silent.tells, silent.joules()) == (False, 0.0)


def test_power_over_time_is_added_by_trapezoids() -> None:
    readings, times = iter([100.0, 300.0, 300.0]), iter([0.0, 2.0, 5.0])
    integral = _Integral(lambda: next(readings), lambda: next(times))
    assert integral.read() == 2 * 200
    assert integral.read() == 2 * 200 + 3 * 300


def test_a_gpus_own_counter_is_in_millijoules_and_one_without_it_is_read_by_power() -> None:
    class NVMLError(Exception):
        """As pynvml's."""

    def refused(handle: str) -> int:
        raise NVMLError

    volta = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetTotalEnergyConsumption=lambda handle: 12_500)
    assert gpu_counter(volta, "gpu").read() == 12.5
    pascal = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetTotalEnergyConsumption=refused,
        nvmlDeviceGetPowerUsage=lambda handle: 250_000,
    )
    assert 0 <= gpu_counter(pascal, "gpu").read() < 250


def test_several_counters_add() -> None:
    meter = EnergyMeter([Counter(iter([0.0, 1.0]).__next__), Counter(iter([5.0, 7.0]).__next__)])
    assert meter.joules() == 3.0
