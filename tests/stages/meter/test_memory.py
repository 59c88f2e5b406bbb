"""Memory as the process took it, and the facts of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.meter.machine import available_bytes, describe, device_kind, usable_cores
from stages.meter.memory import PeakMeter, peak_bytes, peak_resident_bytes, reset_peak, resident_bytes

MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's figures are Linux's")
def test_a_large_array_shows_in_the_peak_and_leaves_it_after_a_reset() -> None:
    with PeakMeter() as meter:
        held = np.ones(200 * MIB // 8)
        del held
    if not meter.exact:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 195 * MIB <= meter.bytes - meter.before <= 215 * MIB
    assert reset_peak()
    assert peak_resident_bytes() < meter.bytes - 150 * MIB


def test_the_peak_is_never_below_what_is_held() -> None:
    assert peak_resident_bytes() >= resident_bytes() > 50 * MIB
    assert peak_bytes() > 0


def test_the_machine_is_described_without_torch() -> None:
    code = "import sys; from stages.meter.machine import describe; describe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    facts = describe()
    assert facts["device"] == device_kind() == ("cuda" if facts["accelerators"] else "cpu")
    assert facts["cores"] == usable_cores() >= 1
    assert 0 < available_bytes() <= facts["memory_bytes"]
    assert facts["disk_free_bytes"] > 0


def test_no_device_is_seen_where_none_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.meter.machine import accelerators

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    accelerators.cache_clear()
    assert device_kind() == "cpu"
    accelerators.cache_clear()
