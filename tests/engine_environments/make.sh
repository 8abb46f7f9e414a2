#!/usr/bin/env bash
# Make the environment of an engine, `.venv-NAME` in the repository: tests/engine_environments/make.sh vllm
#
# It has what tests/engine_environments/NAME.txt names, and Longshore from this checkout. One that is there already and was
# made of the same list stays; when pyproject.toml has changed, Longshore is installed anew. Ends with 3 when a package
# cannot be had here: tests of that engine then skip.
set -euo pipefail
cd "$(dirname "$0")/../.."
name="$1"
list="tests/engine_environments/$name.txt"
venv=".venv-$name"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
if ! cmp -s "$list" "$venv/.made"; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  if ! "${pip[@]}" install -r "$list" 'setuptools>=77'; then
    rm -rf "$venv"
    exit 3
  fi
  # CPU builds of these do not fit the torch that the engine pins, and nothing here needs them
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec || true
  cp "$list" "$venv/.made"
fi
if ! cmp -s pyproject.toml "$venv/.longshore"; then
  "${pip[@]}" install --no-build-isolation -e .
  cp pyproject.toml "$venv/.longshore"
fi
