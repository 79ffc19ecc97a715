#!/usr/bin/env bash
# Google Research Football for the Python given (default: .venv's): its libraries, a wheel built once and kept, and what it needs.
#   scripts/football.sh            all of it; about four minutes the first time, seconds afterwards
#   scripts/football.sh --cached   only if the wheel has been built already
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
version=2.10.2
tag=$("$python" -c 'import sys; print(f"cp{sys.version_info.major}{sys.version_info.minor}")')
cache=${SHOAL_FOOTBALL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal/football}
wheel() { find "$cache" -name "gfootball-$version-$tag-*.whl" 2>/dev/null | head -n 1; }
works() { "$python" -c 'import gfootball_engine' 2>/dev/null; }
say() { echo "football: $*"; }

if [ -z "$(wheel)" ]; then
  if [ "${1:-}" = --cached ]; then
    say "not built, so its tests are skipped; \`make football\` builds it."
    exit 0
  fi
  if [ "$tag" != cp311 ] && [ -f /etc/debian_version ] && ! ls /usr/lib/*/libboost_python"${tag#cp}".so >/dev/null 2>&1; then
    say "there is no Boost.Python for this Python ($tag): Debian 12 has it for Python 3.11 alone."
    exit 1
  fi
  packages="cmake make g++ libgl-dev libegl-dev libopengl-dev libsdl2-dev libsdl2-image-dev libsdl2-ttf-dev libsdl2-gfx-dev
    libboost-python-dev libboost-thread-dev libboost-filesystem-dev libboost-system-dev"
  missing=$(for p in $packages; do dpkg -s "$p" >/dev/null 2>&1 || echo "$p"; done)
  if [ -n "$missing" ]; then
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    say "installing" $missing
    $sudo apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
  fi
  say "building the wheel, about four minutes"
  build=$(mktemp -d)
  trap 'rm -rf "$build"' EXIT
  "$python" -m pip install --quiet --disable-pip-version-check psutil setuptools wheel
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: -d "$build" "gfootball==$version"
  tar xzf "$build"/gfootball-*.tar.gz -C "$build"
  grep -rl --include=CMakeLists.txt -e ' -g' "$build" | xargs -r sed -i -E 's/(^|[ "])-g([ ")]|$)/\1\2/g'  # without debug symbols a third of the size
  bin=$(cd "$(dirname "$(command -v "$python")")" && pwd)
  PATH="$bin:$PATH" "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w "$build/out" "$build"/gfootball-*/ >"$build/log" 2>&1 || {
    tail -n 30 "$build/log"
    say "the build failed; its last lines are above."
    exit 1
  }
  mkdir -p "$cache"
  mv "$build"/out/gfootball-*.whl "$cache/"
fi
"$python" -m pip install --quiet --disable-pip-version-check --no-deps "$(wheel)"
"$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt six absl-py opencv-python-headless psutil
if works; then
  say "$version is installed, from $(wheel)"
elif [ "${1:-}" = --cached ]; then
  say "its wheel is here and its libraries are not, so its tests are skipped; \`make football\` installs them."
else
  libraries="libsdl2-2.0-0 libsdl2-image-2.0-0 libsdl2-ttf-2.0-0 libsdl2-gfx-1.0-0 libegl1 libboost-python1.74.0 libboost-filesystem1.74.0 libpython3.11"
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  say "installing" $libraries
  $sudo apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $libraries >/dev/null
  works || { "$python" -c 'import gfootball_engine'; exit 1; }
  say "$version is installed, from $(wheel)"
fi
