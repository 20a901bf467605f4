#!/usr/bin/env bash
# Everything the project is held to: format, lint, types, imports, tests. All of it runs, whatever fails.
#   bash tests/run.sh [--full] [pytest arguments]
#   bash tests/run.sh --transformers VERSION [pytest arguments]: the tests that transformers decides, with that version
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 2

chosen="not full"
[ "${1:-}" != --full ] || { chosen="full or not full"; shift; }
compgen -G '/dev/nvidia[0-9]*' >/dev/null || chosen="($chosen) and not gpu"

./launch.sh --install --dev || exit $?
python=${USPFT_PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # ranks are many, cores few
unset PYTHONDONTWRITEBYTECODE   # what one process compiles, the others read
cores=$(env -u OMP_NUM_THREADS nproc)   # which would answer 1 for one thread
workers=$((cores < 7 ? cores + 1 : 8))   # files side by side: tests of ranks wait more than they compute

# with_transformers VERSION TESTS...: everything else stays as it is, and transformers itself says what it cannot work with.
with_transformers() {
  local version=$1 other
  shift
  other=$("$python" -c 'import sys; print(sys.prefix)')/transformers-$version
  if [ ! -d "$other" ]; then   # kept for the next time
    rm -rf "$other.partial"
    "$python" -m pip install --quiet --no-deps --target "$other.partial" "transformers==$version" || return 1
    mv "$other.partial" "$other"
  fi
  PYTHONPATH="$other${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -q "$@"
}
decided_by_transformers=(
  tests/unit/model/test_transformers.py tests/unit/parameters/test_source.py tests/unit/model/test_attention.py
  tests/unit/families tests/unit/verify/test_plain.py
  tests/parity/test_router.py tests/parity/test_rope.py
)
above=$(sed -n 's/.*"transformers>=.*<\([0-9.]*\)".*/\1/p' pyproject.toml)
newest=${above%.*}.$((${above#*.} - 1)).0

if [ "${1:-}" = --transformers ]; then
  version=${2:?write --transformers VERSION, such as $newest}
  shift 2
  with_transformers "$version" "${decided_by_transformers[@]}" tests/parity/test_models.py "$@"
  exit $?
fi

# What tests write they also sync, as the program does: in memory nothing waits for a disk.
written="" free=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "${free:-0}" -gt $((4 << 20)) ]; then
  written=$(mktemp -d /dev/shm/uspft-tests-XXXXXX) && export TMPDIR=$written
fi
said=$(mktemp -d)
trap 'rm -rf "$said" ${written:+"$written"}' EXIT
phase() {
  local name=$1 start=$SECONDS
  shift
  printf '== %s\n' "$name"
  "$@" || echo "$name" >>"$said/failed"
  printf '%s %s s  ' "$name" $((SECONDS - start)) >>"$said/times"
}
checks() {
  phase format "$python" -m ruff format --check --quiet .
  phase lint "$python" -m ruff check --quiet .
  phase types "$python" -m mypy --no-error-summary
  phase imports "$python" -c 'from importlinter.cli import lint_imports_command as run; run()' --no-logo
  [ $# -gt 0 ] || phase "transformers $newest" with_transformers "$newest" "${decided_by_transformers[@]}"
}
checks "$@" >"$said/checks" 2>&1 &   # one process at a time, beside the tests
phase tests "$python" -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder -m "$chosen" "$@"
wait
cat "$said/checks"

printf '== %s\n' "$(cat "$said/times")"
if [ -s "$said/failed" ]; then
  printf 'FAILED: %s\n' "$(paste -sd ' ' "$said/failed")"
  [ -z "$written" ] || printf 'what tests wrote is in %s until you delete it\n' "$written"
  written=""
  exit 1
fi
echo 'all passed'
