"""The way in. Until a command begins, a stop is one line and exit code 130.

launch.sh starts this file with -S and with SIGINT held back: Python's own handler would print where
in its start the signal hit. Only what is built into Python comes before ours.
"""

import _signal  # type: ignore[import-not-found]
import posix
import sys

SAID = b"stopped before the run had begun\n"

if __name__ == "__main__":
    if sys.argv[1:2] != ["rank"]:  # its supervisor tells by the signal that it had not begun
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            if number != _signal.SIGHUP or _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, lambda *_: (posix.write(2, SAID), posix._exit(130)))
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
    if sys.flags.no_site:
        import site

        site.main()

from uspft.commands.main import main  # noqa: E402 - seconds

if __name__ == "__main__":
    sys.exit(main())
