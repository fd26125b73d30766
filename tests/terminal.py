"""Someone at a terminal: keys go in, what a terminal would show comes out. Waits for output, never for time."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pexpect
import pyte

TESTS = Path(__file__).parent
LONGEST = 30  # seconds until a wait is given up as a failure
READY = "\x1b[6n"  # the editor asks where the cursor is when it begins to draw its prompt
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
ENTER, CTRL_C, CTRL_D, CTRL_T, ALT_ENTER, TAB, UP = "\r", "\x03", "\x04", "\x14", "\x1b\r", "\t", "\x1b[A"


class Typist:
    """Runs `code` with `args` behind a pseudo-terminal of `rows` x `columns`; pyte is the terminal."""

    def __init__(self, code: str, *args: str, home: Path, rows: int = 24, columns: int = 80, **env: str):
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        base |= {"PYTHONPATH": path, "TERM": "xterm-256color", "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
        self.child = pexpect.spawn(
            sys.executable,
            ["-c", code, *args],
            env=base | env,
            dimensions=(rows, columns),
            timeout=LONGEST,
            # A gate that runs in the background hands down an ignored SIGINT, which a terminal's shell would not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.child.delaybeforesend = None
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self.screen.write_process_input = lambda data: self.child.send(data)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = ""
        self.seen = ""

    def type(self, text: str) -> None:
        self.child.send(text)

    def wait(self, text: str) -> str:
        """What was sent to the terminal up to and with `text`, since the last wait."""
        end = time.monotonic() + LONGEST
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} never came after {self.seen[-2000:]!r}"
            self._read(text)
        before, self.seen = self.seen.split(text, 1)
        return before + text

    def wait_shown(self, text: str) -> None:
        """Until `text` stands on the screen."""
        while text not in "\n".join(self.lines()):
            self._read(text)

    def ready(self) -> None:
        self.wait(READY)

    def say(self, text: str) -> None:
        self.type(text + ENTER)

    def _read(self, awaited: str) -> None:
        try:
            data = self.child.read_nonblocking(4096, timeout=LONGEST)
        except (pexpect.EOF, pexpect.TIMEOUT) as error:
            raise AssertionError(f"{awaited!r} never came; the screen is\n" + "\n".join(self.lines())) from error
        self.stream.feed(data)
        self.raw += data.decode(errors="replace")
        self.seen += data.decode(errors="replace")

    def lines(self) -> list[str]:
        """All lines shown so far, those that have scrolled away first."""
        gone = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return gone + [line.rstrip() for line in self.screen.display]

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def leave(self) -> int:
        """Wait for the end; the exit status."""
        while True:
            try:
                self._read("the end")
            except AssertionError:
                break
        self.child.close()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -(self.child.signalstatus or 0))

    def kill(self) -> None:
        self.child.close(force=True)
