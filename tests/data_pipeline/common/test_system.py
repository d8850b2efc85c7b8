"""Progress bars in a terminal and in a log file."""

import io
import sys
import time

import pytest

from data_pipeline.common.system import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_in_a_log_file_is_a_line_of_its_own_each_time_and_messages_lie_between(capfd):
    with progress_bar("training", 4, "step") as bar:
        bar.mininterval = 0
        bar.update(2)
        bar.write("a message")
        bar.set_postfix_str("loss 3", refresh=False)
        bar.update(2)
    out, log = capfd.readouterr()
    assert out == "a message\n"
    assert "\r" not in log
    lines = log.splitlines()
    assert all(line.startswith("training: ") and line.endswith("]") for line in lines)
    assert [line.split(" [")[0].split()[-1] for line in lines] == ["0/4", "2/4", "4/4"]
    assert "loss 3" not in lines[1]
    assert lines[-1].endswith(", loss 3]")


def test_a_bar_in_a_log_file_has_a_line_every_ten_seconds_and_later_every_minute(capfd):
    with progress_bar("training", 4, "step") as bar:
        assert bar.mininterval == 10
        bar.start_t -= 601
        bar.refresh()
        assert bar.mininterval == 60
        for _ in range(3):
            bar.update()
    assert len(capfd.readouterr().err.splitlines()) == 3  # the first, the refresh, the last


def test_a_delayed_bar_that_ends_before_leaves_no_line_in_a_log_file(capfd):
    with progress_bar("joining", 4, "tokens", delay=60) as bar:
        bar.update(4)
    assert capfd.readouterr() == ("", "")


def test_a_bar_in_a_terminal_is_redrawn_in_its_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("training", 4, "step", done=1) as bar:
        bar.mininterval = 0
        bar.update(3)
    states = sys.stderr.getvalue().split("\r")[1:]
    assert "|" in states[0]
    assert " 1/4 [" in states[0]
    assert " 4/4 [" in states[-1]
    assert sys.stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize(("tells", "times"), [(True, "00:10<00:10"), (False, "00:10")])
def test_a_bar_tells_the_remaining_time_unless_the_caller_does(tells, times, capfd):
    with progress_bar("training", 4, "step", tells_remaining=tells) as bar:
        bar.start_t = time.time() - 10.5
        bar.n = 2
        bar.refresh()
    assert f" [{times}, " in capfd.readouterr().err.splitlines()[1]
