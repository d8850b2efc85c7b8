#!/usr/bin/env bash
# Lint and tests, from nothing: bash scripts/test.sh [pytest arguments]
# It leaves out those marked slow; all of them: bash scripts/test.sh -m "slow or not slow"
set -euo pipefail
EXTRAS=dev
source "$(dirname "$0")/setup.sh"
ruff check .
ruff format --check .
# two at a time: most of them wait for processes that they start
python -m pytest -n 2 --dist worksteal -m "not slow" "$@"
