#!/usr/bin/env bash
# Start uspft: make .venv where it is missing or not current, then become `uspft VERB …`.
set -euo pipefail
trap 'exit 130' INT   # else bash, waiting for a command that ends well, would forget it

# What a user is told to type next begins as this was typed, also where --hostfile or an installation
# has started it anew.
export USPFT_PROGRAM=${USPFT_PROGRAM:-$0}

usage() {
  cat <<TEXT
usage: $USPFT_PROGRAM RECIPE.yaml [key.path=value ...]        train
       $USPFT_PROGRAM VERB TARGET [key.path=value ...]
       $USPFT_PROGRAM --install [--dev]                       make .venv and stop

  train      the run
  check      everything that can be known before a process starts; writes nothing
  preprocess what happens to the data before ranks start, on all cores, without a GPU
             (--clean empties the cache)
  inspect    rows as the model will see them: what trains, documents, which rank holds what
             (--rows N; --html FILE)
  verify     the recipe's first steps under every legal layout, beside one process
             (--steps N; --inject order|mask|scale|label must be caught; --all)
  plan       seconds of a step by part, beside other layouts of the same ranks, predicted
             (--ranks N; --hardware NAME; --take N -o FILE writes one as a recipe)
  export     checkpoint -> Hugging Face folder
  chat       talks to the model of an output folder, in the template it was trained in
  report     output folders -> one HTML page: what they did, beside what was predicted
             (-o FILE; --live --port N)
  calibrate  this cluster's links and products -> hardware file (to=FILE)
  recipes    the shipped recipes; recipes NAME [FILE] copies one
  convert    configuration of MindSpore Transformers, axolotl and others -> recipe
             (-o FILE; --ranks N; --from TOOL)
$USPFT_PROGRAM VERB --help says every option of a verb

environment: USPFT_PYTHON=/path/to/python   use that environment, install nothing
             USPFT_TORCH=cpu (or cu130, cu129)   install that build of torch, whatever GPU is here
             NNODES NODE_RANK MASTER_ADDR MASTER_PORT   several hosts; start this on each
several hosts: $USPFT_PROGRAM train RECIPE.yaml --hostfile FILE   starts it on each by ssh
               srun --ntasks-per-node=1 $USPFT_PROGRAM RECIPE.yaml   inside a SLURM allocation
TEXT
}

refuse() {
  printf 'launch.sh: %s\n' "$*" >&2
  exit 2
}

# The first Python that is new enough and can make an environment.
find_python() {
  local name too_old='' no_venv=''
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    command -v "$name" >/dev/null || continue
    if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      too_old=${too_old:-$name}
    elif ! "$name" -c 'import venv, ensurepip' 2>/dev/null; then
      no_venv=${no_venv:-$name}
    else
      command -v "$name"
      return
    fi
  done
  if [ -n "$no_venv" ]; then
    name=$("$no_venv" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    refuse "$no_venv ($name) cannot make an environment: its venv module is missing." \
      "Install it: apt-get install $name-venv (Debian, Ubuntu); elsewhere it is part of Python."
  fi
  refuse "needs Python 3.11 or newer${too_old:+; $too_old is older (or does not run)}." \
    "Install it: apt-get install python3.11 python3.11-venv (Debian, Ubuntu)," \
    "or dnf install python3.11 (Fedora, RHEL)," \
    "or conda create -n uspft python=3.11 and USPFT_PYTHON=/path/to/that/python"
}

# The major version of the NVIDIA driver that is loaded here; nothing where there is none.
driver_major() {
  local text=''
  if ! { read -r text </proc/driver/nvidia/version; } 2>/dev/null && command -v nvidia-smi >/dev/null; then
    read -r text < <(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || text=''
  fi
  [[ $text =~ (^|[^0-9.])([0-9]{3,})\.[0-9] ]] && printf '%s' "${BASH_REMATCH[2]}"
}

# The build of torch that .venv has is one for this host, as install.py has it.
runs_here() {
  local built=$1 driver
  if [ -n "${USPFT_TORCH:-}" ] || [ "$built" = any ]; then
    [ "$built" = any ] || [ "$built" = "$USPFT_TORCH" ]
    return
  fi
  driver=$(driver_major) || return 0
  case $built in
    cpu) return 1 ;;
    cu12*) [ "$driver" -ge 525 ] ;;
    *) [ "$driver" -ge 580 ] ;;
  esac
}

# Complete and current, told without starting Python: install.py writes the same text as the stamp.
is_current() {
  local digest built there now python=$root/.venv/bin/python
  [ -x "$python" ] && [ -f "$root/.venv/pyvenv.cfg" ] || return 1
  { read -r digest built there <"$root/.venv/$1"; } 2>/dev/null || return 1
  now=$(cat "$root/constraints.txt" "$root/pyproject.toml" "$root/install.py" | sha256sum)
  [ "$digest $there" = "${now%% *} $(readlink -f "$python")" ] && runs_here "$built"
}

# Ctrl-C waits until Python can say something better than where in its own start it hit.
held=()
! env --block-signal=INT true 2>/dev/null || held=(env --block-signal=INT)

pwd -P >/dev/null 2>&1 || refuse "the folder in which it runs is no more. Change to one that exists."
self=$(readlink -f "${BASH_SOURCE[0]}")
root=${self%/*}
given=("$@")

[ $# -gt 0 ] || { usage >&2; exit 2; }
dev='' stamp=.uspft-stamp
case $1 in
  -h | --help) usage; exit 0 ;;
  --install)
    [ "${2:-}" != --dev ] || { dev=--dev stamp=.uspft-stamp-dev; shift; }
    [ $# = 1 ] || refuse "--install takes nothing but --dev, not: $2"
    set -- --install
    ;;
  train | check | plan | preprocess | inspect | verify | export | chat | convert | calibrate | report | recipes) ;;
  *) set -- train "$@" ;;
esac
if [ -n "${USPFT_PYTHON:-}" ]; then
  python=$USPFT_PYTHON
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    refuse "USPFT_PYTHON=$python does not run."
  case $version in
    2.* | 3.? | 3.10) refuse "USPFT_PYTHON=$python is Python $version; uspft needs 3.11 or newer." ;;
  esac
  quietly='import _signal, sys; _signal.signal(_signal.SIGINT, _signal.SIG_DFL); '
  quietly+='_signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT]); import runpy, site; '
  quietly+='site.main(); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name="__main__")'
  PYTHONDONTWRITEBYTECODE=1 ${held[@]+"${held[@]}"} "$python" -S -c "$quietly" \
    "$root/install.py" --check $dev
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
else
  python=$root/.venv/bin/python
  if ! is_current "$stamp"; then
    [ -z "${USPFT_INSTALLED:-}" ] || refuse "installed, and yet $root/.venv is not complete." \
      "Remove that folder and start again."
    base=$(find_python)
    USPFT_INSTALLED=1 exec "$base" "$root/install.py" $dev --then "$self" "${given[@]}"
  fi
fi
unset USPFT_INSTALLED

[ "$1" != --install ] || exit 0
[[ $1 != check && $1 != plan ]] || export PYTHONDONTWRITEBYTECODE=1
# The caller's directory is no place to import from: a folder `datasets` there would win.
export PYTHONSAFEPATH=1
export PYTHONUTF8=1   # recipes and lines are UTF-8, and a Latin-1 terminal would end a run at `→`
exec ${held[@]+"${held[@]}"} "$python" -S "$root/uspft/__main__.py" "$@"   # -S: see there
