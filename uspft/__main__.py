"""The entry point; until a command begins, a stop signal ends it with one line and exit code 130.

launch.sh starts this file with -S and with SIGINT held back: Python's own handler would print where
in its start the signal hit. Only built-in modules are imported before the handlers here are set.
"""

import _signal  # type: ignore[import-not-found]
import posix
import sys

SAID = b"stopped before the run had begun\n"

if __name__ == "__main__":
    if sys.argv[1:2] != ["rank"]:  # a signal ends it: its supervisor sees it had not begun
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
