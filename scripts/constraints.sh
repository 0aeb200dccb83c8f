#!/usr/bin/env bash
# Writes constraints.txt: the newest versions that pyproject.toml admits, as pip resolves them in a
# fresh environment. Run make test-all before committing the result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"${PYTHON:-.venv/bin/python}" -m venv "$fresh"
# torch first and exact: an open range can bring a CUDA build of several gigabytes.
"$fresh/bin/pip" install --quiet --disable-pip-version-check "$(grep -E '^torch==' constraints.txt)"
"$fresh/bin/pip" install --quiet --disable-pip-version-check --editable '.[dev]'
{
    echo "# Exact versions that this project is tested with; scripts/setup.sh installs them."
    echo "# Written by make constraints ($("$fresh/bin/python" --version), $(uname -sm))."
    # Without local build tags (torch +cpu), so that any build of the version will do.
    "$fresh/bin/pip" freeze --exclude-editable | sed -E '/^#/d; s/\+[a-z0-9.]+$//'
} >"$fresh/constraints.txt"
mv "$fresh/constraints.txt" constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) versions"
