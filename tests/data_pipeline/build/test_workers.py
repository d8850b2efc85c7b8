"""Preparation at scale: on processes, a dask cluster or a job array the bytes are the same, whoever
is killed; the hashes of a store are followed; nothing is left behind."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, contents

import data_pipeline.build.stages as module
from data_pipeline.build import workers as processes
from data_pipeline.build.prepare import prepare
from data_pipeline.build.stages import group_task
from data_pipeline.build.workers import Task, run_tasks
from data_pipeline.common.errors import UserError
from data_pipeline.common.folders import SEAL, atomic_folder, is_intact, lock_folder, sum_files
from data_pipeline.config import CorpusConfig, DataConfig, VocabConfig
from data_pipeline.corpus import selection
from data_pipeline.corpus.readers import FileChunk
from data_pipeline.sampling.soundness import check_data

DEADLINE = 60  # seconds that anything here may take on a busy machine


@pytest.fixture(scope="module")
def finished(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir made by one process that nobody disturbed; not to be written to."""
    data_dir = tmp_path_factory.mktemp("finished") / "data"
    prepare(config_of(files, data_dir), workers=1)
    return data_dir


@pytest.fixture(autouse=True)
def large(monkeypatch) -> None:
    """Prepare as if the corpus were large: reading is the first stage, nothing is compared."""
    monkeypatch.setattr(selection, "SURE_BYTES", 0)


def config_of(files: list[str], data_dir: Path) -> DataConfig:
    """A share so large that the least held-out size never counts, whether it is looked at or
    not."""
    return DataConfig(
        data_dir=str(data_dir),
        corpus=CorpusConfig(files=files, held_out_fraction=0.4, deduplicate=False),
        vocab=VocabConfig(size=512),
    )


def finished_folders(data_dir: Path) -> set[str]:
    return {p.name for p in (data_dir / "work").glob("*") if p.suffix != ".tmp"}


# ---------------------------------------------------------------------------------- a cluster


@pytest.fixture
def cluster():
    """The address of two dask workers, a process each, that die for good when they are killed.

    Each is given one task at a time: dask blames those that wait at a worker for its end too.
    """
    import dask
    from distributed import LocalCluster

    settings = {"allowed-failures": 2, "worker-saturation": 1.0}
    with (
        dask.config.set({f"distributed.scheduler.{name}": v for name, v in settings.items()}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as local,
    ):
        yield local.scheduler_address


def die_in_the_middle(out: Path) -> None:
    out.with_name(f"{out.name}.{os.getpid()}.tmp").mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGKILL)


def scan_or_die_once(piece: FileChunk, out: Path, *rest) -> None:
    died = Path(f"{out.parents[2]}/died")
    if out.name.endswith("00002") and not died.exists():
        died.touch()
        die_in_the_middle(out)
    real_scan(piece, out, *rest)


def scan_or_die(piece: FileChunk, out: Path, *rest) -> None:
    if out.name.endswith("00002"):
        die_in_the_middle(out)
    real_scan(piece, out, *rest)


real_scan = module.scan_group


def test_a_cluster_that_loses_a_worker_writes_the_same_bytes(
    files, finished, tmp_path: Path, cluster: str, monkeypatch
):
    monkeypatch.setattr(module, "scan_group", scan_or_die_once)
    prepare(config_of(files, tmp_path / "data"), cluster=cluster)
    assert (tmp_path / "died").exists()
    assert contents(tmp_path / "data") == contents(finished)
    assert not (tmp_path / "data/work").exists()


def test_a_piece_that_kills_every_worker_of_a_cluster_is_named(
    files, tmp_path: Path, cluster: str, monkeypatch
):
    monkeypatch.setattr(module, "scan_group", scan_or_die)
    with pytest.raises(UserError, match=r"killed while reading scan-00002 \(.*2\.txt\) \("):
        prepare(config_of(files, tmp_path / "data"), cluster=cluster)


def test_a_mistake_in_the_corpus_comes_back_from_a_cluster(tmp_path: Path, cluster: str):
    (tmp_path / "bad.txt").write_bytes(b"Fine.\n\nBad \xe4.\n")
    with pytest.raises(UserError, match=r"bad\.txt: byte 11 is not utf-8"):
        prepare(config_of([str(tmp_path / "bad.txt")], tmp_path / "data"), cluster=cluster)


def test_a_scheduler_that_goes_away_is_one_line(tmp_path: Path):
    address = tmp_path / "address"
    dask = [sys.executable, "-m", "dask", "scheduler", "--no-dashboard"]
    scheduler = subprocess.Popen(
        [*dask, "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(address)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: address.exists() and address.read_text().rstrip().endswith("}"))
        url = json.loads(address.read_text())["address"]
        threading.Timer(1, scheduler.kill).start()
        with pytest.raises(UserError, match=f"the dask scheduler at {url} has stopped"):
            run_tasks("sleeping", [Task(time.sleep, (600,), "a")], workers=1, cluster=url)
    finally:
        scheduler.kill()
        scheduler.wait()


def test_no_scheduler_is_one_line(files, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    with pytest.raises(UserError, match="no dask scheduler at tcp://127.0.0.1:9"):
        prepare(config_of(files, tmp_path / "data"), cluster="tcp://127.0.0.1:9")


def test_without_dask_the_extra_is_named(files, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r"pip install -e .\.\[cluster\]"):
        prepare(config_of(files, tmp_path / "data"), cluster="tcp://127.0.0.1:9")


# ---------------------------------------------------------------------------------- a job array


def test_a_job_array_writes_the_same_bytes(files, finished, tmp_path: Path):
    config = config_of(files, tmp_path)
    for share in ((2, 3), (0, 3), (1, 3)):
        prepare(config, workers=1, array_task=share)
    assert len(finished_folders(tmp_path)) == 4
    prepare(config, workers=1, finish=True)
    for share in ((1, 2), (0, 2)):  # another array may have another number
        prepare(config, workers=1, array_task=share)
    prepare(config, workers=1, finish=True)
    assert contents(tmp_path) == contents(finished)
    assert not (tmp_path / "work").exists()


def test_an_array_that_drops_duplicates_compares_before_it_reads(files, tmp_path: Path):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(Path(files[1]).read_bytes())
    stores = []
    for name in ("plain", "array"):
        config = config_of([*files, str(copy)], tmp_path / name)
        config.corpus.deduplicate = True
        for stage in range(3 if name == "array" else 0):
            for share in ((1, 2), (0, 2)):
                prepare(config, workers=1, array_task=share)
            if stage < 2:
                prepare(config, workers=1, finish=True)
        prepare(config, workers=1, finish=name == "array")
        stores.append(contents(tmp_path / name))
    assert stores[0] == stores[1]


def test_an_array_task_touches_its_own_pieces_only(files, tmp_path: Path):
    work = tmp_path / "work"
    (work / f"{16 * '0'}-shard-00007.tmp").mkdir(parents=True)  # that another task is writing
    prepare(config_of(files, tmp_path), workers=1, array_task=(1, 2))
    assert sorted(name[16:] for name in finished_folders(tmp_path)) == [
        "-scan-00001",
        "-scan-00003",
    ]
    assert (work / f"{16 * '0'}-shard-00007.tmp").exists()


def test_finish_says_what_is_missing_and_the_plain_command_does_it(files, finished, tmp_path: Path):
    config = config_of(files, tmp_path)
    prepare(config, workers=1, array_task=(1, 2))
    with pytest.raises(UserError, match=r"2 of 4 file chunks .*reading.*scan-00000 \(.*0\.txt\)"):
        prepare(config, workers=1, finish=True)
    prepare(config, workers=1, array_task=(0, 2))
    prepare(config, workers=1, finish=True)
    with pytest.raises(UserError, match=r"4 of 4 file chunks .*encoding.*shard-00000"):
        prepare(config, workers=1, finish=True)
    prepare(config, workers=1)
    assert contents(tmp_path) == contents(finished)


@pytest.mark.parametrize(
    "args", [["--task-index", "1"], ["--num-tasks", "2"], ["--task-index", "2", "--num-tasks", "2"]]
)
def test_a_task_index_without_its_number_is_one_line(args: list[str]):
    command = [sys.executable, "-m", "data_pipeline", "configs/quickstart.yaml", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --task-index") and done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------- one machine


def write_config(folder: Path, files: list[str]) -> Path:
    path = folder / "c.yaml"
    corpus = f"{{files: {files}, held_out_fraction: 0.4, deduplicate: false}}"
    path.write_text(f"data_dir: {folder}/data\ncorpus: {corpus}\nvocab: {{size: 512}}")
    return path


def test_a_command_that_is_killed_at_every_step_ends_with_the_same_bytes(
    files, finished, tmp_path: Path
):
    command = [sys.executable, "-m", "data_pipeline", str(write_config(tmp_path, files))]
    kills = 0
    while True:
        before = finished_folders(tmp_path / "data")
        process = subprocess.Popen(
            [*command, "--workers", "2"], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        while process.poll() is None:
            if finished_folders(tmp_path / "data") - before:
                process.kill()
                process.wait()
            time.sleep(0.002)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert kills < 20
    assert kills >= 2
    assert contents(tmp_path / "data") == contents(finished)
    assert not list(tmp_path.rglob("*.tmp"))


SIGNAL = """
import os, runpy
import data_pipeline.build.{module} as module
real, calls = module.{name}, []
def planted(*arguments, **options):
    calls.append(arguments)
    if len(calls) == 3:
        os.killpg(0, {number})  # workers too, as a terminal does
    return real(*arguments, **options)
module.{name} = planted
runpy.run_module("data_pipeline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "name", "workers", "number"),
    [
        ("stages", "scan_group", 1, signal.SIGTERM),
        ("stages", "encode_scan", 1, signal.SIGUSR1),
        ("workers", "wait", 2, signal.SIGINT),  # the command waits for its workers
        ("workers", "wait", 2, signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_preparation_which_keeps_what_is_finished(
    files, finished, tmp_path: Path, module: str, name: str, workers: int, number: signal.Signals
):
    script = SIGNAL.format(module=module, name=name, number=int(number))
    words = [str(write_config(tmp_path, files)), "--workers", str(workers)]
    python, options = (
        [sys.executable, "-c"],
        {"cwd": ROOT, "timeout": DEADLINE, "text": True, "start_new_session": True},
    )
    done = subprocess.run([*python, script, *words], capture_output=True, **options)
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"stopped on {number.name}; finished work is kept; start the same command again to continue"
    )
    assert "Traceback" not in done.stderr
    assert workers == 2 or not list(tmp_path.rglob("*.tmp"))
    assert len(finished_folders(tmp_path / "data")) >= 2
    prepare(config_of(files, tmp_path / "data"), workers=1)
    assert contents(tmp_path / "data") == contents(finished)


def test_a_killed_worker_stops_the_command_which_names_its_piece_and_goes_on_later(
    files, finished, tmp_path: Path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(module, "scan_group", scan_or_die)
        with pytest.raises(UserError, match=r"killed while reading .*scan-00002 \(.*2\.txt\)") as e:
            prepare(config_of(files, tmp_path), workers=2)
    assert str(e.value).count("scan-") <= 2  # as many as there were workers
    kept = finished_folders(tmp_path)
    assert kept
    again = []
    monkeypatch.setattr(module, "scan_group", lambda *task: (again.append(task), real_scan(*task)))
    prepare(config_of(files, tmp_path), workers=1)
    assert len(again) == 4 - len(kept) and not kept & {out.name for _, out, *_ in again}
    assert contents(tmp_path) == contents(finished)
    assert not list(tmp_path.rglob("*.tmp"))


SLEEP = """
import sys, time
from pathlib import Path
from data_pipeline.build.workers import Task, run_tasks

def work(marker):
    Path(marker).touch()
    time.sleep(600)

if __name__ == "__main__":
    run_tasks("sleeping", [Task(work, (path,), path) for path in sys.argv[1:]], workers=2)
"""


def test_no_worker_outlives_a_command_that_is_killed(tmp_path: Path):
    (tmp_path / "sleep.py").write_text(SLEEP)
    markers = [tmp_path / "a", tmp_path / "b"]
    command = subprocess.Popen(
        [sys.executable, str(tmp_path / "sleep.py"), *map(str, markers)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: all(marker.exists() for marker in markers))  # both are at work
        children = psutil.Process(command.pid).children(recursive=True)
    finally:
        command.kill()
        command.wait()
    _, alive = psutil.wait_procs(children, timeout=3)
    for process in alive:
        process.kill()
    assert len(children) >= 2 and not alive


def wait_for(condition):
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def test_a_second_command_in_the_same_folder_stops_with_one_line(files, tmp_path: Path):
    config = config_of(files, tmp_path)
    with lock_folder(tmp_path), pytest.raises(UserError, match="another command is using"):
        prepare(config, workers=1)
    with lock_folder(tmp_path), pytest.raises(UserError, match="another command is using"):
        prepare(config, workers=1, array_task=(0, 2))
    with lock_folder(tmp_path, shared=True):
        prepare(config, workers=1, array_task=(0, 2))
        with pytest.raises(UserError, match="another command is using"):
            prepare(config, workers=1)
    prepare(config, workers=1)


def test_work_that_a_kill_after_the_manifest_left_is_removed(files, finished, tmp_path: Path):
    shutil.copytree(finished, tmp_path / "data")
    (tmp_path / f"data/work/{16 * '0'}-scan-00000").mkdir(parents=True)
    prepare(config_of(files, tmp_path / "data"), workers=1)
    assert contents(tmp_path / "data") == contents(finished)
    assert not (tmp_path / "data/work").exists()


def test_of_two_who_write_one_result_both_end_and_one_stays(tmp_path: Path):
    out = tmp_path / "out"
    with atomic_folder(out, shared=True) as slow:
        (slow / "file").write_text("same")
        with atomic_folder(out, shared=True) as fast:
            (fast / "file").write_text("same")
        inode = (out / "file").stat().st_ino
    assert (out / "file").stat().st_ino == inode
    assert contents(tmp_path) == {"out/file": b"same"}


def test_of_two_who_hash_one_chunk_both_end(files, tmp_path: Path, monkeypatch):
    source, read = CorpusConfig(files=files).each_source()[0], selection.read_documents
    group = [FileChunk(files[0], "blank_line")]

    def read_after_another(*arguments):
        monkeypatch.setattr(selection, "read_documents", read)
        selection.hash_group(group, tmp_path / "hashes", source)
        return read(*arguments)

    monkeypatch.setattr(selection, "read_documents", read_after_another)
    selection.hash_group(group, tmp_path / "hashes", source)
    assert [path.name for path in tmp_path.iterdir()] == ["hashes"]
    assert is_intact(tmp_path / "hashes")


def test_the_bar_counts_bytes_and_goes_on_where_it_was(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"y" * 1000))
    pieces = [
        FileChunk(str(tmp_path / "a.txt"), "line", 0, 300, "v"),
        FileChunk(str(tmp_path / "a.txt"), "line", 300, 1000, "v"),
        FileChunk(str(tmp_path / "b.txt.gz"), "line", version="v"),
    ]
    tasks = [group_task(len, [piece], tmp_path / "out")[1] for piece in pieces]
    assert [task.size for task in tasks] == [300, 700, (tmp_path / "b.txt.gz").stat().st_size]
    run_tasks("reading", [Task(len, ("",), "a", 2000), Task(len, ("",), "b", 1000)], 1, done=1000)
    line = capsys.readouterr().err.splitlines()[-1].split("\r")[-1]
    assert "4.00k/4.00k" in line and "2/2 file chunks" in line


# ---------------------------------------------------------------------------------- hashes


def test_the_manifest_holds_the_hash_of_every_file_of_the_store(finished: Path):
    manifest = json.loads((finished / "store/manifest.json").read_text())
    said = {
        f"store/{split}/{name}": sha256
        for split in ("train", "held_out")
        for name, sha256 in manifest[split]["sha256"].items()
    } | {"vocab/vocab.txt": manifest["vocab_sha256"]}
    found = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in contents(finished).items()
        if name.endswith((".npy", "vocab.txt"))
    }
    assert said == found and len(said) == 7


def test_a_sound_store_is_verified_and_any_changed_file_is_named(finished: Path, tmp_path: Path):
    data_dir = tmp_path / "data"
    shutil.copytree(finished, data_dir)
    check_data(data_dir, again=True)
    files = [*data_dir.rglob("*.npy"), data_dir / "vocab/vocab.txt"]
    assert len(files) == 7
    for path in files:
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=f"^{path} is damaged or missing: it does not match"):
            check_data(data_dir, again=True)
        path.unlink()
        with pytest.raises(UserError, match=f"^{path} is damaged or missing: it does not match"):
            check_data(data_dir, again=True)
        path.write_bytes(data)
    manifest = data_dir / "store/manifest.json"
    manifest.write_text(manifest.read_text().replace('"tokens": ', '"tokens": 1', 1))
    with pytest.raises(UserError, match="manifest.json is damaged or missing"):
        check_data(data_dir, again=True)


def test_shards_of_another_vocabulary_are_not_taken_for_ours(files, finished, tmp_path: Path):
    config = config_of(files, tmp_path)
    for share in ((0, 2), (1, 2)):
        prepare(config, workers=1, array_task=share)
    prepare(config, workers=1, finish=True)
    prepare(config, workers=1, array_task=(0, 1))
    vocab = next((tmp_path / "work").glob("*-vocab"))
    lines = (vocab / "vocab.txt").read_text().splitlines()
    lines[-2:] = lines[:-3:-1]  # another vocabulary: its last two pieces change places
    (vocab / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    (vocab / SEAL).write_text(json.dumps(sum_files(vocab)))
    with pytest.raises(UserError, match="4 of 4 file chunks are not done yet .encoding"):
        prepare(config, workers=1, finish=True)
