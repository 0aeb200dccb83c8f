#!/usr/bin/env bash
# Makes or repairs .venv: Python, torch, posttrain with its development tools, at tested versions.
# Running it again costs nothing when all is in place, and repairs what an interruption left.
# PYTHON=python3.12 chooses an interpreter; without it the first suitable one is taken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/posttrain-ready
log=.cache/setup.log

say() { printf '%s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

# What was asked for: a change of any of these files means another installation.
wanted() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum; }

is_ready() {
    [[ -f $stamp && "$(cat "$stamp")" == "$(wanted)" ]] &&
        "$venv/bin/python" -c 'import importlib.metadata as m; m.version("posttrain")' 2>/dev/null
}

is_suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if command -v "$name" >/dev/null && is_suitable "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# apt_install PACKAGE...: true when they are installed now.
apt_install() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    say "      installing $* with apt-get" >&2
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } >>"$log" 2>&1
}

get_python() {
    if ! find_python >/dev/null; then
        [[ -z ${PYTHON:-} ]] || fail "PYTHON=$PYTHON is not a Python from 3.11 to 3.14; name another"
        apt_install python3 python3-venv || true
    fi
    find_python || fail "no Python from 3.11 to 3.14 was found. Install one (Debian, Ubuntu: \
sudo apt-get install python3 python3-venv; macOS: brew install python@3.12), or name it: \
make PYTHON=/path/to/python3.12"
}

# The kernels are compiled on first use. Everything runs without, slower.
get_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || apt_install gcc libc6-dev ||
        say "      no C compiler: bf16 training will take two to four times as long (install gcc)"
}

# make_venv PYTHON: a working .venv, kept when the one that is there works.
make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 && is_suitable "$venv/bin/python"; then
        return
    fi
    rm -rf "$venv"
    if ! "$1" -m venv "$venv" >>"$log" 2>&1; then
        # Debian ships ensurepip apart from Python.
        local version
        version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        rm -rf "$venv"
        if ! { apt_install "python$version-venv" || apt_install python3-venv; } ||
            ! "$1" -m venv "$venv" >>"$log" 2>&1; then
            rm -rf "$venv"
            fail "$1 cannot make a virtual environment (see $log). Install its venv module \
(Debian, Ubuntu: sudo apt-get install python$version-venv) and run make again"
        fi
    fi
}

# On a terminal, pip's latest line in place; the log gets everything.
show_progress() {
    if [[ ! -t 1 ]]; then
        cat >>"$log"
        return
    fi
    local line width
    width=$(($(tput cols 2>/dev/null || echo 80) - 7))
    tee -a "$log" | while IFS= read -r line; do printf '\r\033[K      %.*s' "$width" "$line"; done
    printf '\r\033[K'
}

# install ARGUMENT...: pip with the tested versions; the end of its output is shown when it fails.
install() {
    if "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar=off \
        --constraint constraints.txt "$@" 2>&1 | show_progress; then
        return
    fi
    tail -n 15 "$log" >&2
    fail "pip could not install $* (whole output in $log). Check the network and the free space, \
then run make again: it goes on where it stopped"
}

set_up() {
    local python
    : >"$log"
    say "Setting up posttrain in $venv (once; a few minutes, about 2 GB)"
    python=$(get_python)
    say "[1/3] $("$python" --version) in $venv"
    make_venv "$python"
    get_compiler
    # torch goes first and alone: its exact version keeps pip from taking another, larger build.
    local torch
    torch=$(grep -E '^torch==' constraints.txt)
    say "[2/3] $torch (the largest part)"
    install "$torch"
    say "[3/3] posttrain and its tools"
    install --editable '.[dev]'
    "$venv/bin/python" -c 'import posttrain, torch, transformers' 2>>"$log" ||
        fail "the installation does not import (see $log); remove $venv and run make again"
    wanted >"$stamp"
    say "Ready. Next: make quickstart trains a model; $venv/bin/posttrain --help lists the commands"
}

is_ready && exit 0
mkdir -p .cache
if command -v flock >/dev/null; then
    exec 9>.cache/setup.lock
    if ! flock --nonblock 9; then # the second of two waits, then finds the work done
        say "Another make is setting up; waiting for it"
        flock 9
    fi
    is_ready && exit 0
fi
rm -f "$stamp"
set_up
