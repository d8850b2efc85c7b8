"""Prepare a corpus for training: `python -m data_pipeline CONFIG [key=value ...]`."""

import argparse
from pathlib import Path

from data_pipeline.common.errors import UserError, run_command
from data_pipeline.common.signals import catch_signals


def main() -> None:
    catch_signals("what is finished is kept, and the same command does what is missing")
    parser = argparse.ArgumentParser(prog="python -m data_pipeline", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    parser.add_argument("--cluster", metavar="ADDRESS", help="use the workers of a dask scheduler")
    parser.add_argument("--task-index", type=int, metavar="I", help="in a job array: do tasks")
    parser.add_argument("--num-tasks", type=int, metavar="N", help="I, I + N, ... of this stage")
    parser.add_argument("--finish", action="store_true", help="complete the stage of a job array")
    parser.add_argument("--verify", action="store_true", help="compare a store with its hashes")
    args = parser.parse_intermixed_args()
    array_task = read_array_task(args.task_index, args.num_tasks)
    if (array_task is not None) + args.finish + args.verify > 1:
        raise UserError("--task-index, --finish and --verify are different commands; give one")
    from data_pipeline.config import DataConfig, load_config  # slow: a signal may come meanwhile

    config = load_config(DataConfig, args.config, args.overrides)

    # the slowest come after the config, so that a mistake in it shows at once
    from data_pipeline.build.prepare import prepare
    from data_pipeline.sampling.soundness import check_data

    if args.verify:
        number = check_data(Path(config.data_dir), again=True)
        print(f"store: {number:,} files are what the manifest lists")
    else:
        prepare(
            config, args.workers, cluster=args.cluster, array_task=array_task, finish=args.finish
        )


def read_array_task(index: int | None, number: int | None) -> tuple[int, int] | None:
    """Check the task of a job array: (I, N), or None; raises `UserError` unless 0 <= I < N."""
    if index is None and number is None:
        return None
    if index is None or number is None or not 0 <= index < number:
        raise UserError(
            f"--task-index {index} --num-tasks {number}: give both, with an index from 0 to the "
            "number - 1"
        )
    return index, number


def run() -> None:
    """Run the command; a mistake of the user ends in one line and exit code 2, a signal in 75."""
    run_command(main)


if __name__ == "__main__":
    run()
