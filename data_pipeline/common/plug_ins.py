"""Load a user's function that a config names, and check what it returns.

Since its code runs, the config has to list the module in `corpus.plug_ins`, or the function has to
be in a file beside the config. It is called with one sentence before any work begins.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from data_pipeline.common.errors import UserError
from data_pipeline.common.reading import clip, read_file

PROOF = "A first sentence. 第二句话。"


def load_plug_in(
    key: str, name: str, find_fault: Callable[[str, Any], str | None]
) -> Callable[[str], list[str]]:
    """Load the function `package.module:function` or `path.py:function` that a config key names.

    find_fault: says what is wrong with the result for a text, or None. The returned function raises
    `UserError` if the plug-in fails or its result has a fault.
    """
    place, _, attribute = name.rpartition(":")
    try:
        function = getattr(run_file(place) if is_file(name) else import_module(place), attribute)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key} {name} cannot be imported from {os.getcwd()}: {type(error).__name__}: {error}; "
            "correct the name or the file, or install its module"
        ) from None
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"{key} {name} is not a function but {kind}; name a function")

    def call(text: str) -> list[str]:
        try:
            found = function(text)
            found = found if isinstance(found, str) else list(found)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{key} {name} fails on {clip(text)}: {reason}") from None
        if fault := find_fault(text, found):
            raise UserError(f"{key} {name} returned {clip(found)} for {clip(text)}; {fault}")
        return found

    call(PROOF)
    return call


def is_file(name: str) -> bool:
    """Tell whether a plug-in is `path.py:function`, and not of a module."""
    return name.rpartition(":")[0].endswith(".py")


def run_file(path: str) -> ModuleType:
    """Run a Python file as a module, from its source: bytecode stored beside it may be outdated."""
    module = ModuleType(f"plug-in {path}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look for their types
    exec(compile(read_file(Path(path)), path, "exec"), vars(module))
    return module
