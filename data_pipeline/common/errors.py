"""Report in one line what ends a command: errors that the user can correct (exit code 2) and
signals (exit code 75). Print warnings in red."""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress


class UserError(Exception):
    """An error that the user can correct: says what was found, what was expected, what to do."""


def check(holds: bool, message: str) -> None:
    """Raise `UserError` with `message` unless it holds."""
    if not holds:
        raise UserError(message)


class Stopped(BaseException):
    """A signal that has stopped the work: says where, and how to continue; "" if another rank says
    it.

    Like KeyboardInterrupt, not an `Exception`, so that nothing treats it as an error.
    """


def is_fault(error: BaseException) -> bool:
    """Distinguish an error, or a panic of a Rust library (not an `Exception`), from a signal."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


START_AGAIN = 75  # exit code EX_TEMPFAIL of sysexits.h: the same command goes on


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point, and report errors that the user can correct in one line.

    A `UserError` and any error of the operating system end in a line on stderr and exit code 2,
    `Stopped` in a line and exit code 75.
    """
    print_any_text()
    try:
        main()
    except UserError as error:
        message = str(error)
    except Stopped as stopped:
        if stopped.args[0]:
            print(stopped, file=sys.stderr)
        sys.exit(START_AGAIN)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if not error.errno:
            raise
        message = explain(error)
    except MemoryError:
        message = "out of memory: give the command more of it (ulimit -v), or less to do at once"
    else:
        return
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def print_any_text() -> None:
    """Make stdout and stderr bear text that the encoding of the locale lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # it is closed, or has become a pipe
                stream.reconfigure(errors="backslashreplace")


def explain(error: OSError) -> str:
    """Say what an error of the operating system means for the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        is_limit = error.errno == errno.EFBIG
        return (
            f"no space left for {error.filename or 'the output'}: "
            + ("raise the limit on the size of a file (ulimit -f)" if is_limit else "free some")
            + " and run the same command again; finished work is kept"
        )
    return f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}"


def red(text: str) -> str:
    """Colour a line for stdout, unless that is not a terminal or NO_COLOR is set."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\033[31m{text}\033[0m"
    return text
