"""What ends a command is told in a line."""

import pytest

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
