"""Declare the arguments that the commands on a config share."""

from argparse import ArgumentParser


def config_parser(description: str, prog: str | None = None) -> ArgumentParser:
    """Make the parser of a command whose arguments are a config and overrides of its fields.

    prog: how the command is called; None: by the name of its file.
    """
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="override a field of the file"
    )
    return parser
