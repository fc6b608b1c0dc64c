#!/bin/sh
# Install crosstrain and frameworks on a machine without a network, from the folder that `crosstrain env bundle` made.
#
# On a machine with a network, of the same kind (x86_64 or ARM) and with a glibc not newer than here:
#
#     crosstrain env bundle driver mxnet torch.gpu --to bundle          # --python 3.12: for that Python instead
#
# Carry the folder over, then here:
#
#     sh bundle/offline.sh bundle ~/crosstrain                          # the driver alone
#     sh bundle/offline.sh bundle ~/crosstrain mxnet torch.gpu          # and the environments of these frameworks
#     ~/crosstrain/bin/python bundle/train.py framework=mxnet
#
# ~/crosstrain becomes a virtual environment; the frameworks' environments go into the user cache (CROSSTRAIN_CACHE, else
# ~/.cache/crosstrain). On a cluster both must lie where all nodes see them. PYTHON names the interpreter (default: python3.X,
# X as bundled). A later `crosstrain env make NAME` needs these two, as set below: PIP_NO_INDEX=1 PIP_FIND_LINKS=bundle/wheels
set -eu
if [ $# -lt 2 ] || [ ! -f "$1/driver.txt" ]; then
    echo "usage: sh offline.sh BUNDLE VENV [FRAMEWORK …]   (BUNDLE: a folder that crosstrain env bundle driver … made)" >&2
    exit 2
fi
bundle=$(cd "$1" && pwd)
venv=$2
shift 2
wanted=$(sed -n 's/^# python: //p' "$bundle/driver.txt")
export PIP_NO_INDEX=1 PIP_FIND_LINKS="$bundle/wheels" PIP_DISABLE_PIP_VERSION_CHECK=1

"${PYTHON:-python$wanted}" -m venv "$venv"
there=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$there" != "$wanted" ]; then
    echo "error: this bundle is for Python $wanted, ${PYTHON:-python$wanted} is $there: PYTHON=<path of a Python $wanted>" >&2
    exit 1
fi
"$venv/bin/python" -m pip install --quiet -r "$bundle/driver.txt"
if [ $# -gt 0 ]; then
    "$venv/bin/crosstrain" env make "$@"
fi
echo "ready: $venv/bin/python $bundle/train.py framework=fake"
