# Sourced by the scripts beside it: sets `root` to the checkout and finds a Python for the environment.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The environment's own interpreter comes first, so that it is not rebuilt for another version.
find_python() {
    local candidate candidates=("$root/.venv/bin/python" python3 python3.{11..14} python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if suitable "$candidate"; then
            # A virtual environment cannot be made again by its own interpreter: name its base.
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys._base_executable))'
            return 0
        fi
    done
    echo "Grout needs Python 3.11 or later with the modules venv and ensurepip. Tried:" \
        "${candidates[*]}. Install it, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

# prepare GROUP: create or refresh .venv with that group of packages.
prepare() {
    local python
    python=$(find_python)
    "$python" "$root/scripts/environment.py" "$1"
}
