"""One attention layer, forward and backward: our algorithms beside other engines.

python -m benchmarks.attention --processes 4 --documents halves
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.attention import plot, report
from benchmarks.attention.options import options_of, settings_of
from benchmarks.attention.setting import HOSTS, Setting
from benchmarks.lab import results
from benchmarks.lab.cluster import NoCluster, hosts_of
from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of


def main(words: list[str]) -> int:
    """The benchmark measures, or shows, each case; 0, or 1 with the reason on stderr."""
    options = options_of(words)
    signal.signal(signal.SIGTERM, _leave)  # so that hosts and ranks are taken down
    for setting in settings_of(options):
        try:
            result = _kept(setting, options.out) if options.show else _measured(setting)
        except (NoCluster, RuntimeError) as error:
            print(f"{setting.name}: {error}", file=sys.stderr)
            return 1
        if not options.show:
            # One case at a time: a run that is stopped keeps what it has measured.
            found = {**results.read(options.out, "attention"), setting.name: result}
            print(results.write(options.out, "attention", dict(sorted(found.items()))))
        print("\n" + report.text(f"{setting.title}\n{report.about(result)}\n", result["records"]))
        if options.picture:
            plot.draw(options.picture, setting.title, result["records"])
    return 0


def _kept(setting: Setting, folder: Path) -> dict[str, Any]:
    found = results.read(folder, "attention")
    if setting.name not in found:
        raise RuntimeError(f"{folder} has no such case")
    case: dict[str, Any] = found[setting.name]
    return case


def _measured(setting: Setting) -> dict[str, Any]:
    print(setting.title, flush=True)
    result: dict[str, Any] = {"setting": asdict(setting), **circumstances()}
    hosts: AbstractContextManager[list[list[str]]] = nullcontext([[]])
    if setting.host_mbit is not None:
        hosts = hosts_of(HOSTS, setting.host_mbit)
    with hosts as started:
        ranks = Ranks("benchmarks.attention.worker", setting.processes, started)
        result["records"] = records_of(
            ranks, asdict(setting), lambda line: print(f"  {line}", flush=True)
        )
    result["machine"]["load_average_after"] = os.getloadavg()[0]
    return result


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
