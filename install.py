"""Make .venv beside this file with the project and its pinned dependencies; standard library only.

launch.sh runs it where .venv is missing or not current. Four states, told apart by two files
in .venv: a stamp that matches (complete: nothing to do), a stamp that does not (pins changed:
installed over), the mark of an installation under way (killed in the middle: made anew, because
pip takes a half-copied package for a whole one), neither (somebody else's: moved aside).

The stamp also says which build of torch is there: one for GPUs runs on hosts without one too, but
not with every driver, and a build without one is not current where there is a driver.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH_INDEX = "https://download.pytorch.org/whl"
DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = {"13": 580, "12": 525}
"""The oldest major version of NVIDIA's driver that runs programs of a CUDA, by its major version,
as its release notes have it (minor version compatibility)."""
OF_PYPI, FOR_OLDER = "cu130", "cu129"
"""The build of torch that PyPI has (its requirements name the toolkit), and that of TORCH_INDEX for
drivers that are too old for it."""
CPU, ANY = "cpu", "any"
HOPPER = "9.0"
PROBE_SECONDS = 3.0
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")
STAMP, STAMP_DEV, UNDER_WAY = ".uspft-stamp", ".uspft-stamp-dev", ".uspft-installing"
STAMPED_FILES = ("constraints.txt", "pyproject.toml", "install.py")


class InstallError(Exception):
    """The installation cannot go on; the text says why and what to do."""


def say(text: str) -> None:
    """Print one line of progress; on stderr, since a verb's answer may be read from stdout."""
    print(f"uspft: {text}", file=sys.stderr, flush=True)


def requirements(root: Path, *, dev: bool) -> list[str]:
    """Return the requirements that pyproject.toml states, with their supported ranges."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extra = project.get("optional-dependencies", {}).get("dev", []) if dev else []
    return [*project["dependencies"], *extra]


def torch_pin(root: Path) -> str | None:
    """Return constraints.txt's requirement for torch, the package that comes from its own index."""
    lines = (root / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith("torch==")), None)


def stamp_of(root: Path, venv: Path) -> str:
    """Return what a complete .venv is stamped with; launch.sh computes it in bash."""
    digest = hashlib.sha256(b"".join((root / name).read_bytes() for name in STAMPED_FILES))
    built = built_in(venv) if torch_pin(root) else ANY
    return f"{digest.hexdigest()} {built} {os.path.realpath(venv / 'bin' / 'python')}\n"


def is_complete(root: Path, *, dev: bool) -> bool:
    """Tell whether .venv holds everything, for the files, Python and driver that are there now."""
    venv = root / ".venv"
    names = (STAMP, STAMP_DEV) if dev else (STAMP,)
    try:
        stamps = {(venv / name).read_text() for name in names}
    except OSError:
        return False
    if stamps != {stamp_of(root, venv)} or not python_runs(venv):
        return False
    return not torch_pin(root) or runs_here(built_in(venv), driver_version())


def python_runs(venv: Path) -> bool:
    """Tell whether .venv's Python starts, and is the version that its packages were made for."""
    script = "import sys, sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        shown = subprocess.run(
            [venv / "bin" / "python", "-c", script], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return shown.returncode == 0 and Path(shown.stdout.strip()).is_dir()


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock that processes of all hosts sharing the folder take; lockf works over NFS."""
    with path.open("a+") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            handle.seek(0)
            say(f"waiting for the installation by {handle.read().strip() or 'another process'}")
            fcntl.lockf(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(f"{socket.gethostname()}, process {os.getpid()}")
        handle.flush()
        yield


def prepare(root: Path) -> None:
    """Leave a .venv that pip can install into, marked as being under way."""
    venv = (root / ".venv").resolve()
    if (venv / UNDER_WAY).exists():
        say("an earlier installation did not end: making .venv anew")
        shutil.rmtree(venv)
    elif (venv / STAMP).exists():
        if not python_runs(root / ".venv"):
            say(".venv's Python does not run any more: making .venv anew")
            shutil.rmtree(venv)
    elif venv.exists() and any(venv.iterdir()):
        aside = venv.with_name(f"{venv.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        say(f".venv was not made by launch.sh: moving it to {aside.name}")
        venv.rename(aside)
    venv.mkdir(parents=True, exist_ok=True)
    (venv / UNDER_WAY).touch()
    for name in (STAMP, STAMP_DEV):
        (venv / name).unlink(missing_ok=True)
    if not (venv / "pyvenv.cfg").exists():
        version = ".".join(map(str, sys.version_info[:3]))
        say(f"making .venv with Python {version} ({sys.executable})")
        run([sys.executable, "-m", "venv", str(root / ".venv")], "venv")


def die_with_parent() -> None:
    """Ask the kernel to end this child with its parent: an orphaned pip writes into the next."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def run(command: Sequence[str], name: str) -> None:
    """Run a command quietly; raises InstallError with its last lines when it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    # DeepSpeed comes as source: its compiled operators are built on demand, never here.
    done = subprocess.run(
        command,
        env={**environment, "DS_BUILD_OPS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        last = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-20:])
        shown = " ".join(f"'{word}'" if set(word) & set(" <>~") else word for word in command)
        raise InstallError(
            f"{name} failed (exit {done.returncode}):\n{last}\n  to see it again: "
            f"DS_BUILD_OPS=0 {shown}\n  once that works, start launch.sh again"
        )


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver that is loaded on this host, or None."""
    try:
        text = DRIVER.read_text()
    except OSError:
        text = asked_of_gpus("driver_version")
    found = re.search(r"(?<![\d.])\d{3,}\.\d+(\.\d+)?", text.partition("\n")[0])
    return found[0] if found else None


def asked_of_gpus(field: str) -> str:
    """Return what nvidia-smi says of this host's GPUs, a line each; "" where it fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def built_in(venv: Path) -> str:
    """Return which build of torch a .venv holds: cu130 for CUDA 13.0, or cpu."""
    for file in venv.glob("lib/python*/site-packages/torch/version.py"):
        found = re.search(r"^cuda\b.*?=\s*'(\d+)\.(\d+)", file.read_text(), re.MULTILINE)
        if found:
            return f"cu{found[1]}{found[2]}"
    return CPU


def least_driver(build: str) -> int:
    """Return the oldest major version of the driver that runs a build for GPUs."""
    return LEAST_DRIVER.get(build[2:4], max(LEAST_DRIVER.values()))


def runs_here(build: str, driver: str | None) -> bool:
    """Tell whether a build of torch is one for this host; launch.sh tells the same in bash."""
    if wish := os.environ.get("USPFT_TORCH"):
        return build == wish
    if driver is None:
        return True
    return build != CPU and int(driver.partition(".")[0]) >= least_driver(build)


def build_for(driver: str | None) -> str:
    """Return the build of torch to install. Raises InstallError where the driver runs none."""
    if wish := os.environ.get("USPFT_TORCH"):
        if not re.fullmatch(r"cpu|cu\d{3}", wish):
            raise InstallError(f"USPFT_TORCH={wish} is no build of torch; write cpu or {OF_PYPI}")
        return wish
    if driver is None:
        return CPU
    for build in (OF_PYPI, FOR_OLDER):
        if runs_here(build, driver):
            return build
    raise InstallError(
        f"this host's NVIDIA driver is {driver}, and torch is built for CUDA 12.9, which needs "
        f"driver {least_driver(FOR_OLDER)} or newer: update the driver, or set USPFT_TORCH=cpu"
    )


def is_reachable(url: str, seconds: float) -> bool:
    """Tell whether a page answers in time; the name's look-up has no time-out but the thread's."""
    answers: list[int] = []

    def ask() -> None:
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(url, timeout=seconds) as page,
        ):
            answers.append(page.status)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(answers)


def install_torch(pip: Sequence[str], torch: str, driver: str | None, there: str | None) -> None:
    """Install torch alone, in the build for this host. Raises InstallError where it has none.

    there: the build that is installed already, if any, which pip would take for the same.
    """
    build = build_for(driver)
    index = f"{TORCH_INDEX}/{build}"
    on = f"NVIDIA driver {driver}" if driver else "no NVIDIA driver"
    command = [*pip, "--no-deps", *(["--force-reinstall"] if there not in (None, build) else [])]
    if build == OF_PYPI:
        say(f"installing {torch} ({on}: the build {build}; the first time takes minutes)")
    elif is_reachable(f"{index}/torch/", PROBE_SECONDS):
        say(f"installing {torch} ({on}: the build {build})")
        command += ["--index-url", index]
    elif driver or os.environ.get("USPFT_TORCH"):
        raise InstallError(
            f"{index} does not answer, and PyPI has {torch} for CUDA 13.0, which needs driver "
            f"{least_driver(OF_PYPI)} or newer ({on}): reach that page, update the driver, or set "
            f"USPFT_TORCH={OF_PYPI if build == CPU else CPU}"
        )
    else:
        say(f"installing {torch} ({on}, and {index} does not answer)")
    run([*command, torch], "pip")


def require_build(torch: str, build: str, driver: str | None) -> None:
    """Check that the build that was installed runs here. Raises InstallError where it does not."""
    if runs_here(build, driver):
        return
    wish = os.environ.get("USPFT_TORCH")
    wanted = f"USPFT_TORCH={wish} asks for another" if wish else f"the NVIDIA driver is {driver}"
    needs = "no GPU" if build == CPU else f"driver {least_driver(build)} or newer"
    raise InstallError(
        f"{torch} came in the build {build}, which is for {needs}, and {wanted}: see which index "
        f"pip takes it from, or set USPFT_TORCH={build} to have it all the same"
    )


def add_flash_attention(pip: Sequence[str], build: str) -> None:
    """Install flash-attn 3 where this host has a GPU for it, and a wheel is to be had.

    Its wheels are for every torch from 2.9 on. A run says where it goes without.
    """
    if build == CPU or HOPPER not in asked_of_gpus("compute_cap").split():
        return
    index = f"{TORCH_INDEX}/{build}"
    try:
        if not is_reachable(f"{index}/flash-attn-3/", PROBE_SECONDS):
            raise InstallError("it does not answer")
        say("installing flash-attn-3 (compute capability 9.0)")
        options = ("--no-deps", "--only-binary", ":all:", "--index-url", index)
        run([*pip, *options, "flash-attn-3"], "pip")
    except InstallError:
        say(f"no wheel of flash-attn-3 from {index}: attention takes a slower kernel")


def install_packages(root: Path, pip: Sequence[str], *, dev: bool) -> None:
    """Install torch, then everything else, at the versions of constraints.txt."""
    wanted = requirements(root, dev=dev)
    constrained = [*pip, "-c", str(root / "constraints.txt")]
    torch, venv, driver = torch_pin(root), root / ".venv", driver_version()
    if torch:
        has_one = any(venv.glob("lib/python*/site-packages/torch/version.py"))
        # A range would fetch gigabytes for a GPU where a build without one is at hand.
        install_torch(pip, torch, driver, built_in(venv) if has_one else None)
        run([*constrained, torch], "pip")
        require_build(torch, built_in(venv), driver)
        add_flash_attention(pip, built_in(venv))
    say(f"installing {len(wanted)} packages and what they need")
    run([*constrained, *wanted], "pip")


def add_project(root: Path, python: Path) -> None:
    """Make the project importable in .venv, and `uspft` a command there; needs no network."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", script], text=True).strip())
    # Relative, so that it holds under another mount point too.
    (packages / "uspft.pth").write_text(os.path.relpath(root, packages) + "\n")
    command = python.with_name("uspft")
    command.write_text(
        # The caller's folder is no place to import from; what is to be typed next begins with $0.
        '#!/bin/sh\nexport PYTHONSAFEPATH=1 USPFT_PROGRAM="$0"\n'
        'exec "$(dirname "$0")/python" -m uspft "$@"\n'
    )
    command.chmod(0o755)
    say("compiling the project")
    compileall.compile_dir(root / "uspft", quiet=2)


def lacking(wanted: Sequence[str]) -> list[str]:
    """Return a line for each requirement that the environment of this Python does not meet."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging is not installed"]
    lines = []
    for requirement in map(Requirement, wanted):
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{requirement.name} is not installed (needs {requirement})")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lines.append(f"{requirement.name} is {found} (needs {requirement})")
    return lines


def install(root: Path, *, dev: bool = False, pip: Sequence[str] = ()) -> None:
    """Bring root/.venv to what the project's files say; raises InstallError.

    `pip` replaces the command that installs (tests have no network).
    """
    with lock(root / ".venv.lock"):
        if is_complete(root, dev=dev):
            return
        start_seconds = time.monotonic()
        if torch_pin(root):
            build_for(driver_version())  # refused before anything is touched
        prepare(root)
        venv = root / ".venv"
        python = venv / "bin" / "python"
        install_packages(root, pip or [str(python), *PIP], dev=dev)
        add_project(root, python)
        for name in (STAMP, STAMP_DEV) if dev else (STAMP,):
            aside = venv / f"{name}.new"
            aside.write_text(stamp_of(root, venv))
            aside.replace(venv / name)
        (venv / UNDER_WAY).unlink()
        say(f"installed in {time.monotonic() - start_seconds:.0f} s")


def main(arguments: Sequence[str]) -> None:
    """Install, or with --check look at this Python's packages; then become the --then command."""
    parser = argparse.ArgumentParser(prog="install.py", description=__doc__)
    parser.add_argument("--dev", action="store_true", help="with what the tests need")
    parser.add_argument("--check", action="store_true", help="name what this Python lacks")
    parser.add_argument("--then", nargs=argparse.REMAINDER, default=[], help="run this at the end")
    given = parser.parse_args(arguments)
    if given.check:
        missing = lacking(requirements(ROOT, dev=given.dev))
        if missing:
            say("\n  ".join([f"USPFT_PYTHON={sys.executable} lacks packages:", *missing]))
            sys.exit(2)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # subprocess.run ends its child
        try:
            install(ROOT, dev=given.dev)
        except InstallError as error:
            say(str(error))
            sys.exit(1)
        except OSError as error:
            say(f"cannot install into {ROOT}: {error}; USPFT_PYTHON names an environment to use")
            sys.exit(1)
        except KeyboardInterrupt:
            say("installation interrupted; the next start makes it anew")
            sys.exit(130)
    if given.then:
        os.execv(given.then[0], given.then)


if __name__ == "__main__":
    main(sys.argv[1:])
