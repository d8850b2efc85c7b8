"""Several commands at work in one folder, such as the tasks of a job array."""

import fcntl
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import (
    check_writable,
    claim_folder,
    lock_folder,
    remove_entries,
    size_of,
    write_file,
)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a"
    write_file(path, b"old")

    def fail(source, target) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_what_long_work_cannot_write_is_known_before_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "new/a")
    assert not list((tmp_path / "new").iterdir())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        check_writable(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError):
        check_writable(tmp_path / "file/a")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_file(check_writable(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "gone/real")
    assert check_writable(tmp_path / "link") == tmp_path / "gone/real"
    assert (tmp_path / "gone").is_dir()


def test_a_file_of_a_folder_of_links_is_replaced_and_not_what_its_link_leads_to(
    tmp_path: Path,
) -> None:
    """As in a copy of a run that is made of links."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "real").read_bytes() == b"old" and (tmp_path / "link").read_bytes() == b"new"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link", "/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        with pytest.raises(UserError, match=f"{name} is not a regular file but a pipe or a device"):
            check_writable(tmp_path / name)
    with pytest.raises(UserError, match="folder is a folder; name a file"):
        check_writable(tmp_path / "folder")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no folder in memory")
def test_files_in_memory_are_files() -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        check_writable(Path(folder, "a"))
        write_file(Path(folder, "a"), b"x")
        assert Path(folder, "a").read_bytes() == b"x"


def test_what_a_command_reads_is_not_its_output(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("text", "model/weights.bin", "model/vectors.npy"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link").symlink_to("text")
    inputs = [tmp_path / "text", tmp_path / "model"]
    for name in ("text", "link", "model/weights.bin"):
        with pytest.raises(UserError, match=f"{name} is read by this command, which would replace"):
            check_writable(tmp_path / name, inputs)
    check_writable(tmp_path / "model/vectors.npy", inputs)


def test_a_folder_that_is_a_file_or_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="run_dir .*/file is a file; choose another run_dir"):
        claim_folder(tmp_path / "file", (), "run_dir", bool)
    with pytest.raises(UserError, match="run_dir .*/link is a link to .*/gone, which does not"):
        claim_folder(tmp_path / "link", (), "run_dir", bool)


def test_an_array_shares_its_lock_on_a_file_system_that_locks_bytes(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    # as NFS and SMB do on Linux: flock(2), "NFS details"
    monkeypatch.setattr("data_pipeline.common.folders.fcntl.flock", fcntl.lockf)
    for shared in (True, False):
        with lock_folder(tmp_path, shared):
            assert "cannot be locked" not in capsys.readouterr().out


def test_what_two_commands_remove_at_once_is_gone_and_both_end(tmp_path: Path, monkeypatch) -> None:
    folder, remove = tmp_path / "work", shutil.rmtree
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)

    def remove_twice(path: Path) -> None:
        remove(path)
        remove(path)  # which the other one has done

    monkeypatch.setattr(shutil, "rmtree", remove_twice)
    remove_entries(folder, bool)
    assert not folder.exists()


def test_files_that_vanish_while_they_are_counted_count_for_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "there").write_bytes(b"12345")
    monkeypatch.setattr(os, "walk", lambda folder: [(str(folder), [], ["gone", "there"])])
    assert size_of(tmp_path) == 5


def test_of_two_commands_that_write_a_file_at_once_both_end(tmp_path: Path, monkeypatch) -> None:
    path, replace = tmp_path / "probes.json", os.replace

    def replace_after_another(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_file(path, b"other", shared=True)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_another)
    write_file(path, b"mine", shared=True)
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]
