"""`python -m data_pipeline CONFIG [key=value ...]`: corpus -> vocabulary -> token store."""

import argparse

from data_pipeline.config import DataConfig, load_config
from data_pipeline.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline", description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    args = parser.parse_intermixed_args()
    config = load_config(
        DataConfig, args.config, args.overrides, others=("model", "train", "tracking")
    )

    from data_pipeline.prepare import prepare  # after the config: a mistake in it shows at once

    prepare(config, args.workers)


if __name__ == "__main__":
    run_command(main)
