"""Prepare a corpus for training: `python -m data_pipeline CONFIG [key=value ...]`."""

from pathlib import Path

from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import UserError, run_command
from data_pipeline.common.signals import catch_signals


def main() -> None:
    catch_signals("finished work is kept; start the same command again to continue")
    parser = config_parser(__doc__, "python -m data_pipeline")
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="run on the workers of this dask scheduler"
    )
    parser.add_argument(
        "--task-index",
        type=int,
        metavar="I",
        help="in a job array: do tasks I, I + N, ... of the stage",
    )
    parser.add_argument(
        "--num-tasks", type=int, metavar="N", help="in a job array: number of its tasks"
    )
    parser.add_argument("--finish", action="store_true", help="in a job array: complete the stage")
    parser.add_argument(
        "--verify", action="store_true", help="compare the files of the store with their hashes"
    )
    args = parser.parse_intermixed_args()
    array_task = read_array_task(args.task_index, args.num_tasks)
    if (array_task is not None) + args.finish + args.verify > 1:
        raise UserError("--task-index, --finish and --verify exclude each other; give one")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: wanted 1 or more")
    from data_pipeline.config import DataConfig  # slow: a signal may come meanwhile
    from data_pipeline.config_file import load_config

    config = load_config(DataConfig, args.config, args.overrides)

    # the slowest come after the config, so that a mistake in it shows at once
    from data_pipeline.build.prepare import prepare
    from data_pipeline.sampling.soundness import check_data

    if args.verify:
        number = check_data(Path(config.data_dir), again=True)
        print(f"store: all {number:,} files match the manifest")
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
            "number of tasks - 1"
        )
    return index, number


def run() -> None:
    """Run the command; a mistake of the user ends in one line and exit code 2, a signal in 75."""
    run_command(main)


if __name__ == "__main__":
    run()
