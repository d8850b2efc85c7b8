"""A disk that is full, or that cannot be written: one line, and the same command goes on later."""

import errno
import gzip
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT, contents, fork

from data_pipeline.build.prepare import check_disk, prepare
from data_pipeline.build.stages import Work
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import remove_entries, size_of
from data_pipeline.config import DataConfig
from data_pipeline.config_file import load_config
from pretrain.config import Config
from pretrain.run_setup import check_resources

# A file system of a size, in a namespace of its own; tests of it are left out where that is not
# allowed, and limits of the size of a file stand for them.
MOUNT = 'mount -t tmpfs -o size={size} tmpfs "{folder}" && exec "$@"'
NO_MOUNT = subprocess.run(
    ["unshare", "-m", "sh", "-c", MOUNT.format(size="1m", folder="/tmp"), "sh", "true"],
    capture_output=True,
).returncode if shutil.which("unshare") else 1  # fmt: skip
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
runpy.run_module("data_pipeline", run_name="__main__", alter_sys=True)
"""


def words_of(prepared: Path, data_dir: Path) -> list[str]:
    files = [str(prepared / "config.yaml"), f"data_dir={data_dir}", "--workers", "1"]
    return [*files, "corpus.deduplicate=true"]


def assert_one_line(done: subprocess.CompletedProcess, *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert all(word in line for word in said), line


@pytest.mark.parametrize("kilobytes", [1, 5, 20, 60, 100])
def test_a_file_that_cannot_grow_ends_preparation_in_a_line_and_it_goes_on_later(
    prepared: Path, tmp_path: Path, kilobytes: int
) -> None:
    """The limit on the size of a file makes any write fail as a full disk does."""
    words = words_of(prepared, tmp_path / "data")
    done = fork(["-c", LIMITED, str(kilobytes << 10), *words])
    assert_one_line(done, "no space left")
    assert not (tmp_path / "data/store").exists()
    assert fork(["-m", "data_pipeline", *words]).returncode == 0
    fork(["-m", "data_pipeline", *words_of(prepared, tmp_path / "straight")])
    both = contents(tmp_path / "data/store"), contents(tmp_path / "straight/store")
    assert both[0] == both[1]


@pytest.mark.skipif(NO_MOUNT, reason="no file system may be mounted here")
@pytest.mark.parametrize("kilobytes", [100, 300, 500, 700])
def test_a_full_disk_ends_preparation_in_a_line(
    prepared: Path, tmp_path: Path, kilobytes: int
) -> None:
    """The estimate is switched off, so that the disk is full in the midst of the work."""
    folder = tmp_path / "small"
    folder.mkdir()
    blind = "import data_pipeline.build.prepare as p, runpy; p.check_disk = lambda work: None; "
    blind += "runpy.run_module('data_pipeline', run_name='__main__', alter_sys=True)"
    mount = MOUNT.format(size=f"{kilobytes}k", folder=folder)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", blind]
        + words_of(prepared, folder / "data"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert_one_line(done, "no space left")


@pytest.mark.parametrize("command", ["data_pipeline", "pretrain"])
def test_a_disk_that_is_too_small_is_noticed_before_the_work(
    prepared: Path, tmp_path: Path, monkeypatch, capfd, command: str
) -> None:
    from runpy import run_module

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 9000, 9000))
    where = {"data_pipeline": "data_dir", "pretrain": "run_dir"}[command]
    words = [command, str(prepared / "config.yaml"), f"{where}={tmp_path / 'new'}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        run_module(command, run_name="__main__", alter_sys=False)
    said = capfd.readouterr().err
    assert end.value.code == 2 and said.count("error:") == 1
    assert (
        f"{tmp_path / 'new'}, but the disk has 0 MB free; free some space, or choose another"
        in said
    )


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_preparation_takes_the_disk_that_it_asks_for_and_is_refused_a_byte_below(
    prepared: Path, tmp_path: Path, monkeypatch, pack
) -> None:
    """At least so much is asked for, and at most a third of what is taken."""
    name, data_dir = tmp_path / ("a.txt.gz" if pack is gzip.compress else "a.txt"), tmp_path / "new"
    name.write_bytes(pack((prepared / "topics.txt").read_bytes() * 8))
    asked, taken = [], []

    def note(folder: Path, wanted: float, *others) -> None:
        asked.append(wanted)

    def measure(folder: Path, _) -> None:
        taken.append(size_of(data_dir))
        remove_entries(folder, _)

    options = [f"data_dir={data_dir}", f"corpus.files={name}"]
    config = load_config(DataConfig, str(prepared / "config.yaml"), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.build.prepare.check_space", note)
        patch.setattr("data_pipeline.build.stages.remove_entries", measure)
        prepare(config, workers=1)
    assert asked[0] < max(taken) < 3 * asked[0]
    assert_asked_for(asked[0], monkeypatch, lambda: check_disk(Work(replace_dir(config, tmp_path))))


def test_a_run_takes_the_disk_that_it_asks_for_and_is_refused_a_byte_below(
    prepared: Path, straight: Path, tmp_path: Path, monkeypatch
) -> None:
    asked = []
    config = load_config(Config, str(prepared / "config.yaml"), [f"run_dir={tmp_path / 'run'}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.run_setup.check_space", lambda _, wanted, *__: asked.append(wanted))
        check_resources(config, 1024)
    kept = [size_of(path) for path in (straight / "checkpoints").iterdir()]
    assert len(kept) == 2
    assert asked[0] == pytest.approx(1.5 * sum(kept), rel=0.05)  # and one in work
    assert_asked_for(asked[0], monkeypatch, lambda: check_resources(config, 1024))


def assert_asked_for(wanted: float, monkeypatch, check: Callable[[], None]) -> None:
    """A disk with so many bytes free is enough, and one with a byte less is refused."""
    usage = namedtuple("usage", "total used free")
    for free in (math.ceil(wanted), math.ceil(wanted) - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(10**12, 0, free))
        if free >= wanted:
            check()
        else:
            with pytest.raises(UserError, match="free some space, or choose another"):
                check()


def replace_dir(config: DataConfig, folder: Path) -> DataConfig:
    return replace(config, data_dir=str(folder / "another"))


@pytest.mark.parametrize(
    "error",
    [errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EIO, errno.EACCES],
    ids=errno.errorcode.get,
)
def test_any_error_of_the_operating_system_is_a_line(error: int, capsys) -> None:
    from data_pipeline.common.errors import run_command

    def fail() -> None:
        raise OSError(error, os.strerror(error), "some/file")

    with pytest.raises(SystemExit) as end:
        run_command(fail)
    assert end.value.code == 2
    line = f"error: some/file cannot be read or written: {os.strerror(error)}\n"
    assert capsys.readouterr().err == line


def test_a_library_that_raises_an_oserror_of_its_own_is_no_line(capsys) -> None:
    from data_pipeline.common.errors import run_command

    def fail() -> None:
        raise OSError("no number, no name: a bug")

    with pytest.raises(OSError, match="a bug"):
        run_command(fail)


@pytest.mark.parametrize("name", ["x" * 300, "config.yaml/data", "/proc/data"])
@pytest.mark.parametrize("command", ["data_pipeline", "pretrain"])
def test_a_folder_that_cannot_be_made_is_named(
    prepared: Path, tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "config.yaml").write_text("")
    key = {"data_pipeline": "data_dir", "pretrain": "run_dir"}[command]
    words = ["-m", command, str(prepared / "config.yaml"), f"{key}={tmp_path / name}"]
    assert_one_line(fork(words), str(tmp_path / name))
