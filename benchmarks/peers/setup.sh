#!/usr/bin/env bash
# Makes or repairs .cache/peers/NAME: an environment of its own for a system that benchmarks compare
# with. NAME is trl or vllm. PYTHON=... chooses the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

name=${1:-}
[[ -n $name && -f $here/$name.txt ]] || {
    printf 'peers: there is no %s; usage: benchmarks/peers/setup.sh trl|vllm\n' "${name:-peer without a name}" >&2
    exit 2
}
venv=.cache/peers/$name
stamp=$venv/peer-ready
wanted() { cat "$here/$name.txt" "$here/setup.sh" | cksum; }

[[ -f $stamp && "$(cat "$stamp")" == "$(wanted)" ]] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null || {
    printf 'peers: %s is not Python 3.11 or newer; name one: PYTHON=/path/to/python3.11 %s %s\n' "$python" "$0" "$name" >&2
    exit 1
}
printf 'Setting up %s in %s (once; a few minutes, 2 to 4 GB)\n' "$name" "$venv"
mkdir -p "$(dirname "$venv")"
rm -f "$stamp"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# torch goes first and alone: its exact version keeps pip from taking another, larger build.
"${pip[@]}" install --quiet --progress-bar=off "$(grep '^torch==' "$here/$name.txt")"
"${pip[@]}" install --quiet --progress-bar=off --requirement "$here/$name.txt"
# vLLM asks for these; they arrive as CUDA builds that cannot be imported, and text needs none.
[[ $name != vllm ]] ||
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec triton
"$venv/bin/python" -c "import ${name}"
wanted >"$stamp"
