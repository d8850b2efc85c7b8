"""What ends a command is told in a line."""

import errno
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

from data_pipeline.common.errors import UserError, check, run_command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"), (UserError("a\n b"), 2, "error: a b\n")],
)
def test_a_command_that_ends_early_says_why_in_a_line(error, code, said, capsys) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == code and capsys.readouterr().err == said


def test_what_holds_is_no_error() -> None:
    check(True, "no error")
    with pytest.raises(UserError, match="^an error$"):
        check(False, "an error")


def test_a_command_prints_any_text_in_any_locale() -> None:
    code = "from data_pipeline.common.errors import run_command; run_command(lambda: print('中'))"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"\\u4e2d\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "error: out of memory: give the command more"),
        (OSError(errno.ENOSPC, "full", "a"), "error: no space left for a: free some and run"),
        (
            OSError(errno.EFBIG, "large", "a"),
            "error: no space left for a: raise the limit on the size",
        ),
    ],
)
def test_what_is_lacking_is_said_in_a_line(error: Exception, said: str, capsys) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.match(said, line)
