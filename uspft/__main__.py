"""The entry point; until a command begins, a stop signal ends it with one line and exit code 130.

launch.sh starts this file with -S and with SIGINT blocked: Python's own handler would print a
traceback of the start-up. Only built-in modules are imported before the handlers here are set.
"""

import _signal  # type: ignore[import-not-found]
import posix
import sys

SAID = b"stopped before the run had begun\n"

if __name__ == "__main__":
    # a signal ends a rank at once: its supervisor knows that it had not begun
    if sys.argv[1:2] != ["rank"]:
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
