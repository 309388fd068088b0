# Sourced by the other scripts: where they work, and how they keep quiet.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
  echo "error: $*" >&2
  exit 1
}

# quietly LABEL COMMAND...: one line if it works, the end of its output if it does not.
quietly() {
  local label=$1 log status=0
  shift
  log=$(mktemp)
  ("$@") >"$log" 2>&1 || status=$?  # a subshell: what exits in there must not end us unheard
  if ((status)); then
    tail -n 60 "$log" >&2
    rm -f "$log"
    fail "$label failed with exit code $status: $*"
  fi
  rm -f "$log"
  echo "ok: $label"
}

# The tools of the environment, so that no script needs it activated.
tool() {
  local name=$1
  shift
  [[ -x .venv/bin/$name ]] || fail "$name is not installed; run 'make install' first"
  ".venv/bin/$name" "$@"
}
