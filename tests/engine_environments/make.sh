#!/usr/bin/env bash
# Make the environment of an engine, `.venv-NAME` in the repository: tests/engine_environments/make.sh vllm
#
# It has what tests/engine_environments/NAME.txt names, what NAME.no-deps.txt names without its dependencies, and Longshore
# from this checkout. One that is there already and was made of the same list stays; when pyproject.toml has changed,
# Longshore is installed anew. Ends with 3 when a package cannot be had here: tests of that engine then skip. A list that
# begins with "# On top of the environment of" is installed without dependencies, and without Longshore: everything else
# comes from that environment, which is vLLM's, made if it is not there, or the one of $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/../.."
name="$1"
list="tests/engine_environments/$name.txt"
venv=".venv-$name"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
if grep -q '^# On top of the environment of' "$list"; then
  if grep -q '^# On top of the environment of vLLM' "$list"; then
    tests/engine_environments/make.sh vllm
    PYTHON="$PWD/.venv-vllm/bin/python"
  fi
  base="$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  cmp -s <(echo "$base"; cat "$list") "$venv/.made" && exit 0
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv --without-pip "$venv"
  echo "$base" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/longshore_base.pth"
  if ! "${pip[@]}" install --no-deps --no-build-isolation -r "$list"; then
    rm -rf "$venv"
    exit 3
  fi
  (echo "$base"; cat "$list") > "$venv/.made"
  exit 0
fi
if ! cmp -s "$list" "$venv/.made"; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  if ! "${pip[@]}" install -r "$list" 'setuptools>=77'; then
    rm -rf "$venv"
    exit 3
  fi
  # CPU builds of these do not fit the torch that the engine pins, and nothing here needs them
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec || true
  alone="tests/engine_environments/$name.no-deps.txt"
  if [ -f "$alone" ] && ! "${pip[@]}" install --no-deps -r "$alone"; then
    rm -rf "$venv"
    exit 3
  fi
  packages=$(echo "$venv"/lib/python3*/site-packages)
  if [ -d "$packages/sglang" ]; then
    # SGLang imports torchvision, whose compiled operators do not fit a CPU build of torch: it does without them.
    sed -i -E 's/import _meta_registrations, /import /; /^ *_(meta|autograd)_registrations,$/d' \
      "$packages/torchvision/__init__.py"
    # Without kernels of its own it imports one of vLLM's, and then computes in torch.
    mkdir -p "$packages/vllm" && touch "$packages/vllm/__init__.py"
    printf 'def rotary_embedding(*_):\n    raise NotImplementedError\n' > "$packages/vllm/_custom_ops.py"
  fi
  cp "$list" "$venv/.made"
fi
if ! cmp -s pyproject.toml "$venv/.longshore"; then
  "${pip[@]}" install --no-build-isolation -e .
  cp pyproject.toml "$venv/.longshore"
fi
