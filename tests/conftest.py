"""What holds for every test, however the suite was started."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, and what is started from here would be deaf to Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
