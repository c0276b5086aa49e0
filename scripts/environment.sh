# Sourced by the other scripts: goes to the checkout, and makes .venv if it is not there.
#
#     source "$(dirname "$0")/environment.sh"; prepare dev

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Install this checkout, with the extras given, unless that was done for these very requirements.
prepare() {
    local extras="${1:-}"
    local stamp=".venv/.installed-${extras:-plain}"
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys
if sys.version_info < (3, 10):
    sys.exit(f"captionjob needs Python 3.10 or newer; this is {sys.version.split()[0]}")'
        "${PYTHON:-python3}" -m venv .venv
    fi
    if [ -n "$extras" ] || [ ! -e .venv/.installed-dev ]; then
        # The kernels in C are built by an installation, too.
        if [ ! -e "$stamp" ] || [ -n "$(find pyproject.toml constraints.txt pipeline/kernels \
            -newer "$stamp" -name '*.[ch]' -o -newer "$stamp" -name '*.t[ox]*')" ]; then
            echo "installing captionjob into .venv (the first time takes a few minutes)" >&2
            .venv/bin/python -m pip install --quiet --disable-pip-version-check \
                -c constraints.txt -e ".${extras:+[$extras]}"
            touch "$stamp"
        fi
    fi
}
