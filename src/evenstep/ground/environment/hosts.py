"""Lists of hosts as schedulers and launchers write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_RUN_OF_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_slurm_hosts(text: str) -> list[str]:
    """Slurm's compressed list: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        ValueError: The text is malformed.
    """
    if not re.fullmatch(r"(?:[^][]|\[[^][]*\])*", text):
        raise ValueError(f"{text!r}: brackets don't match")
    parts = re.split(r",(?![^[]*\])", text)  # at commas outside of brackets
    return [host for part in parts if part for host in _expand(part)]


def expand_slurm_counts(text: str) -> list[int]:
    """Slurm's tasks per node: "2(x3),1" is 2, 2, 2, 1.

    Raises:
        ValueError: The text is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _RUN_OF_COUNTS.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r} isn't a number of tasks")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def hosts_of_node_file(lines: Iterable[str]) -> list[str]:
    """The distinct hosts of a `PBS_NODEFILE`, which has a line per slot, in order."""
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def host_of_open_mpi_uri(uri: str) -> str | None:
    """The first address of a `OMPI_MCA_orte_hnp_uri`: "1884356608.0;tcp://10.0.0.1,10.1.0.1:48633;tcp6://..."."""
    found = re.search(r"tcp://([^,:;]+)", uri)
    return found[1] if found else None


def control_of_hydra(command_lines: Sequence[str]) -> str | None:
    """The address "host:port" of this job's mpiexec, from the command lines of this process's ancestors.

    Hydra (MPICH, Intel MPI) gives its ranks no variable that identifies the job. But its proxies, the parents of the
    ranks, have mpiexec's address on their command line.
    """
    for line in command_lines:
        if "hydra" not in line:
            continue
        control = re.search(r"--control-port[ =](\S+:\d+)", line)
        if control:
            return control[1]
        host, port = re.search(r"--upstream-host[ =](\S+)", line), re.search(r"--upstream-port[ =](\d+)", line)
        if host and port:
            return f"{host[1]}:{port[1]}"
    return None


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece)
        if found is None:
            raise ValueError(f"{piece!r} isn't a range of hosts")
        first, last = found[1], found[2] or found[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    # A name may have more than one pair of brackets: rack[1-2]-node[1-4].
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]
