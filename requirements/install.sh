#!/bin/sh
# Make .venv with everything in requirements/test.txt and evenstep itself, unless that has been done.
#
# Usage, from the root of the checkout: sh requirements/install.sh [python [folder torch]]
#
# With a folder and a version of torch: that environment instead of .venv, with this torch instead of the pinned one.
# What was installed is written to a file `installed` there, last of all: an interrupted install doesn't count, and
# neither does one for other pins, or one whose folder has been moved since (an editable install knows evenstep by its
# path).
set -eu

python=${1:-python3}
venv=${2:-.venv}
torch=${3:-}
wanted=$(cksum requirements/test.txt pyproject.toml && pwd -P && echo "$torch")

if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

stop() {
    echo "evenstep: $1" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    stop "there is no '$python' here. Install python 3.10 or later, or name one: make PYTHON=/path/to/python3 ..."
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    stop "'$python' does not run. Name another: make PYTHON=/path/to/python3 ..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    stop "'$python' is python $version; 3.10 or later is needed. Name another: make PYTHON=/path/to/python3.12 ..."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    stop "'$python' (python $version) has no venv module. On Debian and Ubuntu: apt-get install python3-venv"

rm -f "$venv/installed"
if [ -e "$venv/bin/python" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then
    clear=--clear # its python has gone: nothing of it can be used
elif [ -L "$venv/bin/python" ] && [ ! -e "$venv/bin/python" ]; then
    clear=--clear
else
    clear=
fi

# A bar for a person; in a log, only what goes wrong.
quiet=--quiet
[ -t 1 ] && quiet=
export PIP_DISABLE_PIP_VERSION_CHECK=1

echo "evenstep: installing into $venv with python $version (the first time that takes minutes: torch is large)"
"$python" -m venv $clear "$venv"
pins=requirements/test.txt
if [ -n "$torch" ]; then
    pins=$venv/pins.txt
    # setuptools as this torch demands it: torch 2.11 refuses the pinned one.
    sed -e "s/^torch==.*/torch==$torch/" -e 's/^setuptools==.*/setuptools>=77.0.3/' requirements/test.txt >"$pins"
fi
"$venv/bin/python" -m pip install $quiet -r "$pins"
# The pins are the build's environment too, so that nothing unpinned is fetched to build with.
"$venv/bin/python" -m pip install $quiet --no-deps --no-build-isolation -e .
"$venv/bin/python" -c 'import evenstep'
printf '%s\n' "$wanted" >"$venv/installed"
