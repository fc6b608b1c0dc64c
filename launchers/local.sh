#!/bin/sh
# A sweep on this machine that may be interrupted and goes on where it ended.
#
#     launchers/local.sh framework=torch,mxnet network=lenet,fcn_r repeat=1,2,3
#     launchers/local.sh +study=quick_look
#
# The arguments are those of `python train.py -m`. Start it in the folder that shall hold the results (outputs/ and mlruns/).
# Ctrl-C, a reboot or a full disk ends it; the same line in the same folder runs the cells that have no ok run yet. A cell
# whose settings, environment or machine changed counts as another one and runs again.
#
# To log out meanwhile:  nohup launchers/local.sh … > sweep.log 2>&1 &    (stop it with: kill <process id>)
# To see first what would run:  launchers/local.sh … dry_run=true
#
# PYTHON names the interpreter that has crosstrain (default: python3). The exit code is train.py's: 0 all ok, 1 some run not
# ok, 2 configuration error, 3 tracking store not usable, 130 / 143 interrupted.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/../train.py" -m skip_finished=true "$@"
