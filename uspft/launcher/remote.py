"""The start of a command on every host of a hostfile, by ssh; each host has its own supervisor."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from uspft.launcher.hosts import LaunchError, carriers, is_loopback, resolve
from uspft.launcher.supervise import POLL_SECONDS, Signals
from uspft.launcher.terminal import say

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
NO_CONNECTION = 255
"""ssh's exit code where it did not reach a host."""
PORT = "29500"
"""The default MASTER_PORT, as in torchrun and DeepSpeed."""
BY_HOSTFILE = "USPFT_BY_HOSTFILE"
"""The variable that tells a host that all hosts end when one is gone."""
TAKEN_ALONG = (
    *("USPFT_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "UCX_", "FI_", "HF_", "OMP_", "MALLOC_"),
    *("XDG_CACHE_HOME", "http_proxy", "https_proxy", "no_proxy"),
)
"""Prefixes of environment variables that are copied to every host."""
END_SECONDS = 10.0
"""How long the other hosts may take to end by themselves after one has failed."""
KILL_SECONDS = 30.0

# The first line of stdin is the environment, which may hold secrets and must not be on a command
# line. Each later line asks to stop; end of file, also when the connection is lost, asks to save
# and end.
SCRIPT = """\
IFS= read -r settings; eval "$settings"; cd {folder} || exit 2
exec 3<&0
{command} </dev/null 3<&- & child=$!
{{ while read -r _; do kill -TERM $child; done; kill -HUP $child; }} <&3 >/dev/null 2>&1 & heed=$!
wait $child; code=$?; kill $heed 2>/dev/null; exit $code
"""


def run_on_hosts(
    file: Path, words: Sequence[str], environment: Mapping[str, str], program: Sequence[str]
) -> int:
    """Run a command on every host of a hostfile, and return one exit code for all.

    words: the command without its `--hostfile`. program: what starts uspft, at the same path on
    every host. Slots become launch.processes, unless the words set that. Output of host 0 is shown
    unchanged, lines of others after the host's name. Raises LaunchError.
    """
    if told := next((name for name in ("NNODES", "NODE_RANK") if name in environment), None):
        raise LaunchError(
            f"{told} is set together with --hostfile, which sets it on each host; unset it"
        )
    names, slots = read_hostfile(file)
    if slots and not any(word.startswith("launch.processes=") for word in words):
        words = [*words, f"launch.processes={slots}"]
    where = {
        "NNODES": str(len(names)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or names[0],
        "MASTER_PORT": environment.get("MASTER_PORT") or PORT,
    }
    taken = {
        key: value
        for key, value in environment.items()
        if key.startswith(TAKEN_ALONG) and "\n" not in value
    }
    settings = where | taken | {BY_HOSTFILE: "1"}
    command = shlex.join([*program, *words])
    script = SCRIPT.format(folder=shlex.quote(os.getcwd()), command=command)
    signals = Signals()
    with signals.caught():
        remotes = {
            name: _start(name, script, settings | {"NODE_RANK": str(index)}, shown=index == 0)
            for index, name in enumerate(names)
        }
        try:
            return _follow(remotes, signals)
        finally:
            for process in remotes.values():
                process.kill()


def _start(
    name: str, script: str, settings: Mapping[str, str], *, shown: bool
) -> subprocess.Popen[bytes]:
    """Start a host's command, without ssh on this host. Raises LaunchError."""
    here = ["sh", "-c", script]
    command = here if _is_here(name) else [*SSH, name, shlex.join(here)]
    output = None if shown else subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output if shown else subprocess.STDOUT,
            start_new_session=True,  # otherwise a terminal's Ctrl-C would end ssh itself
        )
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}; --hostfile needs it") from error
    line = "export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in settings.items())
    _write(process, line)
    if process.stdout:
        threading.Thread(target=_show, args=(name, process.stdout), daemon=True).start()
    return process


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to a host's command, unless it has ended."""
    assert process.stdin
    with contextlib.suppress(OSError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _show(name: str, lines: IO[bytes]) -> None:
    for line in lines:
        say(f"[{name}] {line.decode(errors='replace').rstrip()}")


def _is_here(name: str) -> bool:
    """Tell whether a name is this host's own."""
    if is_loopback(name) or name in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        return resolve(name)[1] in carriers()
    except OSError:
        return False


def _follow(remotes: Mapping[str, subprocess.Popen[bytes]], signals: Signals) -> int:
    """Wait until all commands have ended, and return the exit code of the first that failed.

    Where one has failed, the other hosts learn it from one another; those that do not end are asked
    to stop after END_SECONDS, and abandoned after as long again.
    """
    ended: dict[str, int] = {}
    asked, code, failed = 0, 0, 0.0
    while True:
        for name, process in remotes.items():
            status = process.poll()
            if status is None or name in ended:
                continue
            ended[name] = status
            if status == NO_CONNECTION:
                say(f"{name}: ssh did not reach this host, or has lost it")
            if status and not failed:
                failed = time.monotonic() - END_SECONDS * (status == NO_CONNECTION)
                code = status if 0 < status < NO_CONNECTION else 1
        waited = time.monotonic() - failed if failed else 0.0
        if len(ended) == len(remotes) or waited > END_SECONDS + KILL_SECONDS:
            return code
        if signals.count > asked or (waited > END_SECONDS and not asked):
            asked += 1
            for process in remotes.values():  # the second request: stop at once
                _write(process, "stop")
        time.sleep(POLL_SECONDS)


LINE = re.compile(r"(?P<name>\S+?)(?::(?P<colon>\d+))?(?P<rest>(?:\s+\w+=\S+)*)")
"""`name`, `name slots=8 max_slots=8` (DeepSpeed, Open MPI) or `name:8` (MPICH)."""
SLOTS = re.compile(r"slots=(\d+)")


def read_hostfile(file: Path) -> tuple[list[str], int | None]:
    """Return the hosts of a file in order, and the ranks per host, or None if the file does not
    say.

    A host on several lines has the slots of all of them. Raises LaunchError, with file and line,
    where a line cannot be read, or where hosts have different numbers of slots.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise LaunchError(f"--hostfile: `{file}`: {why}; name a file with a host a line") from error
    slots: Counter[str] = Counter()
    bare: Counter[str] = Counter()
    first: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        found = LINE.fullmatch(line)
        rest = found["rest"].split() if found else []
        told = [SLOTS.fullmatch(word) for word in rest]
        counts = [one[1] for one in told if one] + ([found["colon"]] if found else [])
        count = next(filter(None, counts), None)
        unread = [word for word, one in zip(rest, told, strict=True) if not one]
        if not found or count == "0" or any(word.startswith("slot") for word in unread):
            raise LaunchError(f"{file}:{number}: `{line}` is no host; write `name slots=8`")
        name = found["name"]
        first.setdefault(name, number)
        slots[name] += int(count or 1)
        bare[name] += count is None
    if not slots:
        raise LaunchError(f"--hostfile: `{file}` names no host; write `name slots=8` on a line")
    if all(bare[name] == slots[name] == 1 for name in slots):
        return list(slots), None
    (known, most), *rest = slots.items()
    for name, count in rest:
        if count != most:
            raise LaunchError(
                f"{file}:{first[name]}: {name} has {count} slots and {known} {most}; "
                "write as many for every host"
            )
    return list(slots), most
