"""What the user can put right ends in one line and exit code 2; every entry point goes through
here. What they should know is a line in red."""

import errno
import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what we were given: says what was found, what was wanted, what to do next."""


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point; a `UserError` or a full disk ends in one line on stderr and exit code
    2."""
    try:
        main()
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"no space left for {error.filename or 'the output'}: free some and run the "
            message += "same command again; what was complete before is kept"
        elif error.filename and isinstance(
            error, (PermissionError, NotADirectoryError, FileExistsError)
        ):
            message = f"{error.filename} cannot be read or written: {error.strerror}"
        else:
            raise
    else:
        return
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def red(text: str) -> str:
    """Colour a line that goes to stdout, if that is a terminal and NO_COLOR is not set."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\033[31m{text}\033[0m"
    return text
