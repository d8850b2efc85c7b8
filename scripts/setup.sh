# Sourced by the other scripts: makes .venv beside the project and installs into it, once.
# PYTHON names the interpreter to make it from; EXTRAS the extras to install.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=".venv/installed-$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')-$EXTRAS"
if [ ! -e "$stamp" ]; then
    echo "setting up .venv (once; torch is a large download)"
    [ -e .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    # torch first and pinned: a loose range may choose a build with gigabytes of CUDA
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]"
    touch "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
