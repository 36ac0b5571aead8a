#!/bin/sh
# What a fresh Debian 12 needs: redis-server, and .venv with exactly requirements.lock. Run again, it sees that all is there.
set -eu
cd "$(dirname "$0")/.."

apt_install() {
    if [ "$(id -u)" != 0 ]; then
        echo "error: $* is missing; install it as root: apt-get install $*" >&2
        exit 1
    fi
    apt-get update -qq
    if [ ! -e /usr/sbin/policy-rc.d ]; then # packages must not start services: the mesh starts its own Redis
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

command -v redis-server >/dev/null && command -v redis-cli >/dev/null || apt_install redis-server redis-tools

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than 3.11; set PYTHON to a newer one" >&2
    exit 1
}
wanted=$(cat requirements.lock pyproject.toml scripts/setup.sh | sha256sum)
stamp=.venv/setup-stamp
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
        "$python" -m venv .venv
    fi
    echo "installing the packages of requirements.lock into .venv (1.7 GB, a minute or two)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
    printf '%s' "$wanted" >$stamp
fi
