#!/bin/sh
# Install the launchers that `make test-launchers` tests against: Open MPI, MPICH, and Slurm with munge. Debian, as root.
#
# Where that can't be done it says so and ends well: the tests skip what isn't there, with the reason.
set -u

have() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]
}

packages=
have mpiexec.openmpi || packages="$packages openmpi-bin"
have mpiexec.mpich || packages="$packages mpich"
have srun || packages="$packages slurm-client"
have slurmctld || packages="$packages slurmctld"
have slurmd || packages="$packages slurmd"
have munged || packages="$packages munge"
[ -n "$packages" ] || exit 0

if ! have apt-get || [ "$(id -u)" != 0 ]; then
    echo "evenstep: not installed, and only root can install with apt-get:$packages; their tests are skipped"
    exit 0
fi
echo "evenstep: installing$packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list
apt-get install -y -qq --no-install-recommends $packages >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >/dev/null 2>&1 ||
    echo "evenstep: apt-get could not install$packages; their tests are skipped"
exit 0
