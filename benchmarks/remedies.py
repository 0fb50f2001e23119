"""Remedies tried on five scripts that don't scale: which comes first, and whether it gains what was predicted.

    python benchmarks/remedies.py                    # the slow network is made of two namespaces; needs root

Each script of `remedies_script.py` goes through `evenstep bench --try` on one and two replicas. The remedies that a
person who knows would choose stand in `CHOICES`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import Namespaces, describe_machine

from evenstep.bench.command import scaling
from evenstep.cli.bench import build_parser

SCRIPT = Path(__file__).with_name("remedies_script.py")
CHOICES: dict[str, tuple[str, ...]] = {
    "wide": ("sharded",),
    "thin": ("backend", "wrapper", "sharded"),
    "gpt": ("sharded", "fused", "backend", "wrapper"),
    "loader": ("workers",),
    "network": ("16-bit",),
}
STEPS = {"wide": 40, "thin": 200, "gpt": 40, "loader": 40, "network": 40}


def try_on(kind: str, flags: Sequence[str], rate_mbit: float) -> dict[str, Any]:
    """The report of one script."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        launch = None
        if kind == "network":
            hosts = stack.enter_context(Namespaces(2, rate_mbit=rate_mbit))

            def launch(num_replicas: int, arguments: list[str]) -> list[tuple[list[str], dict[str, str]]]:
                if num_replicas == 1:
                    run = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "1", *arguments]
                    return [(hosts.command(0, run), hosts.environment(0))]
                return [
                    (hosts.evenstep_run(host, ["--nproc-per-node", "1", *arguments]), hosts.environment(host))
                    for host in range(2)
                ]

        args = build_parser().parse_args(
            [
                "run",
                "--try",
                "--replicas=1,2",
                "--threads-per-rank=1",
                "--device=cpu",
                "--out",
                out,
                *flags,
                str(SCRIPT),
                kind,
            ]
        )
        scaling(args, launch)
        report: dict[str, Any] = json.loads((Path(out) / "report.json").read_text())
        return report


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        "| script | tried | predicted | measured | within each other's spread |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for kind, report in reports.items():
        for number, trial in enumerate(report["tried"]["trials"]):
            chosen = " (as one would choose)" if number == 0 and trial["changes"][0] in CHOICES[kind] else ""
            within = {True: "yes", False: "no", None: trial["failure"]}[trial["as_predicted"]]
            title = f"{trial['title']}{chosen}"
            lines.append(f"| {kind} | {title} | {_told(trial['predicted'])} | {_told(trial['gain'])} | {within} |")
        if report["tried"]["best"]:
            best = report["tried"]["best"]
            lines.append(f"| {kind} | together: {best['title']} | | {_told(best['gain'])} | |")
    return "\n".join(lines)


def _told(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def main() -> None:
    """Try, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scripts", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="of the slow network")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--steps", type=int, help="counted steps of a run; as many as take a second or more")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(machine)
    reports: dict[str, dict[str, Any]] = {}
    for kind in arguments.scripts:
        flags = ["--repeats", str(arguments.repeats), "--steps", str(arguments.steps or STEPS[kind])]
        reports[kind] = try_on(kind, flags, arguments.rate_mbit)
        if arguments.json is not None:  # after each: the whole takes long
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"machine": machine, "reports": reports}, indent=1))
    print(f"\n{table(reports)}")


if __name__ == "__main__":
    main()
