"""A soak measures growth, and only growth."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soak
from helpers import ROOT
from html_page import Page

SECONDS = np.arange(600.0)


@pytest.mark.parametrize(
    ("memory", "slope"),
    [
        (500 + SECONDS / 60, 1.0),
        (500 + 300 * (SECONDS < 150), 0.0),  # a warm-up
        (500 + 200 * (SECONDS % 60 == 59), 0.0),  # peaks
    ],
)
def test_the_slope_is_that_of_the_rest_without_its_peaks(memory: np.ndarray, slope: float) -> None:
    rows = np.stack([SECONDS, memory, 0 * SECONDS + 9, 0 * SECONDS + 3], 1)
    found = soak.summarize(rows)
    assert found["mb_a_minute"] == pytest.approx(slope, abs=0.02)
    assert found["descriptors"] == [9, 9] and found["threads"] == [3, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_two_processes_are_measured_and_stopped(prepared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/soak.py", str(prepared / "config.yaml"), "--minutes=0.1"]
    command += ["--page", str(tmp_path / "soak.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["steps"] > 2 and len(found["processes"]) == 2, done.stderr
    for one in found["processes"]:
        assert 50 < one["memory_mb"][1] < 5000 and one["threads"][1] >= 2
    assert done.returncode == any(one["mb_a_minute"] >= 0.2 for one in found["processes"])
    page = Page((tmp_path / "soak.html").read_text(encoding="utf-8"))
    page.assert_whole()
    assert page.tags["figure"] == 3 and f"{found['steps']:,} steps in 0.1 minutes" in page.text
