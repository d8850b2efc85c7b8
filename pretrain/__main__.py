"""Train a model, resuming if the run has a checkpoint, and export it at the end:
`accelerate launch -m pretrain CONFIG [key=value ...]`.

`python -m pretrain configs` lists the recipes, and copies one as a CONFIG to edit.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from data_pipeline.common.arguments import config_parser
from data_pipeline.common.errors import UserError, check, run_command
from data_pipeline.common.signals import catch_signals, die_with_launcher, outlive_readers
from pretrain import recipes

T = TypeVar("T")
PATIENCE = 10.0  # seconds in which the first process of a machine tells a mistake in the config


def main() -> None:
    if sys.argv[1:2] == ["configs"]:
        return recipes.main(sys.argv[2:])
    catch_signals("no new step is done yet; start the same command again")
    outlive_readers()
    die_with_launcher()  # before the slow imports, during which a launcher may end
    parser = config_parser(__doc__, "python -m pretrain")
    args = parser.parse_intermixed_args()
    from data_pipeline.config_file import load_config  # a signal may come during any import
    from pretrain.config import Config

    config = tell_once(lambda: load_config(Config, args.config, args.overrides))
    if not any(item.startswith("run_dir=") for item in args.overrides):
        tell_once(lambda: check_moved(Path(args.config), Path(config.run_dir)))

    from pretrain.train import train  # slow, so a mistake in the config is reported first

    train(config)


def check_moved(path: Path, run_dir: Path) -> None:
    """Raise `UserError` if a config lies in a run folder that was moved: the run would begin anew
    where it was."""
    folder = path.resolve().parent
    check(
        path.name != "config.yaml"
        or not (folder / "checkpoints").is_dir()
        or folder == run_dir.resolve(),
        f"{path} belongs to a run whose run_dir was {run_dir}; add run_dir={path.parent} to "
        "resume it, or another run_dir to start a new run",
    )


def tell_once(read: Callable[[], T]) -> T:
    """Read or check the config; the first process of a machine tells a mistake in it, and its
    launcher ends the others meanwhile."""
    try:
        return read()
    except UserError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise


def run() -> None:
    """Run the command; a mistake of the user ends in one line and exit code 2, a signal in 75."""
    run_command(main)


if __name__ == "__main__":
    run()
