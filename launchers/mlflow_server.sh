#!/bin/sh
# A team's MLflow server: the numbers in PostgreSQL, the artifacts in a folder, through the server; login and path prefix if wanted.
#
#     export DATABASE=postgresql+psycopg2://mlflow:PASSWORD@localhost/mlflow
#     launchers/mlflow_server.sh /srv/mlflow                             # http://<this host>:5000
#     ADMIN_PASSWORD=… launchers/mlflow_server.sh /srv/mlflow            # with a login (the first user is admin)
#     PREFIX=/ml NAMES=lab.example.org launchers/mlflow_server.sh …      # behind a proxy that passes on https://lab.example.org/ml
#
# Once, before: an empty database (sudo -u postgres createuser --pwprompt mlflow; sudo -u postgres createdb --owner mlflow mlflow)
# and, in the Python that PYTHON names (default: python3): pip install mlflow psycopg2-binary, for a login also Flask-WTF.
# The folder keeps artifacts/ and, with a login, auth.ini and secret; back it up together with the database.
#
# HOST and PORT: where it listens (0.0.0.0, 5000). NAMES: the names by which the team reaches it, in words; others are refused
# (403 Invalid Host header). WORKERS: processes (4). PERMISSION: what a login may do in experiments of others (EDIT; with READ the
# admin gives EDIT to each who measures). On the team's machines: export MLFLOW_TRACKING_URI=http://<name>:5000, and with a login
# MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. After an update of MLflow: mlflow db upgrade "$DATABASE"
set -eu
if [ $# -ne 1 ] || [ -z "${DATABASE:-}" ]; then
    echo "usage: DATABASE=postgresql+psycopg2://USER:PASSWORD@HOST/NAME mlflow_server.sh FOLDER" >&2
    exit 2
fi
umask 077
mkdir -p "$1/artifacts"
folder=$(cd "$1" && pwd)
names="localhost,localhost:*,127.0.0.1,127.0.0.1:*"
for name in ${NAMES:-$(hostname) $(hostname -f 2>/dev/null || true)}; do
    names="$names,$name,$name:*"
done

# by the environment: everyone on this machine can read command lines
export MLFLOW_BACKEND_STORE_URI="$DATABASE" MLFLOW_REGISTRY_STORE_URI="$DATABASE"
# without eight more processes for jobs about language models, unless the team wants them
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION="${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}"
set -- --host "${HOST:-0.0.0.0}" --port "${PORT:-5000}" --workers "${WORKERS:-4}" --allowed-hosts "$names"
set -- "$@" --artifacts-destination "$folder/artifacts"
if [ -n "${PREFIX:-}" ]; then
    set -- "$@" --static-prefix "$PREFIX"
fi
if [ -n "${ADMIN_PASSWORD:-}" ]; then
    [ -s "$folder/secret" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/secret"
    cat > "$folder/auth.ini" <<END
[mlflow]
default_permission = ${PERMISSION:-EDIT}
database_uri = $DATABASE
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
END
    MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$folder/secret")
    export MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_AUTH_CONFIG_PATH="$folder/auth.ini" MLFLOW_AUTH_ADMIN_PASSWORD="$ADMIN_PASSWORD"
    set -- "$@" --app-name basic-auth
fi
exec "${PYTHON:-python3}" -m mlflow server "$@"
