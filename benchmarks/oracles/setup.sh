#!/usr/bin/env bash
# Makes or repairs .cache/oracles-venv: the published packages, and what importing them needs.
# Apart from .venv, because they pin other versions of transformers than we run on.
# PYTHON=... chooses an interpreter; OpenRLHF's wheel is for Python 3.11 alone.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

venv=.cache/oracles-venv
stamp=$venv/oracles-ready
wanted() { cat "$here"/{requirements.txt,published.txt,setup.sh} | cksum; }

[[ -f $stamp && "$(cat "$stamp")" == "$(wanted)" ]] && exit 0

python=${PYTHON:-python3.11}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    printf 'oracles: %s is not Python 3.11, which the wheel of OpenRLHF is for; name one: make oracles PYTHON=/path/to/python3.11\n' "$python" >&2
    exit 1
}
printf 'Setting up the published packages in %s (once; a few minutes, about 1.5 GB)\n' "$venv"
mkdir -p .cache
rm -f "$stamp"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar=off)
# torch goes first and alone: its exact version keeps pip from taking another, larger build.
"${pip[@]}" "$(grep '^torch==' "$here/requirements.txt")"
"${pip[@]}" --requirement "$here/requirements.txt"
"${pip[@]}" --no-deps --requirement "$here/published.txt"
wanted >"$stamp"
