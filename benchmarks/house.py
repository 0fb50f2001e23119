"""What the code consists of, in this checkout and in another commit: lines, folders, imports, private names of torch.

    python benchmarks/house.py                           # this checkout
    python benchmarks/house.py --against 7ad604a         # and that commit, in a worktree of its own for the while
    python benchmarks/house.py --against 7ad604a --json build/house.json

The same code, this file's, counts both. A line of a docstring counts as docstring, with the blank ones inside it; a
line with nothing but a comment as comment; a line with nothing as blank; every other line as code. What
`import evenstep` takes is measured after `import torch`, in processes of the two commits that take turns, all files
compiled before. That wants a quiet machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit import test_house as rules  # noqa: E402

KINDS = ("code", "docstring", "comment", "blank")
MEASURE_IMPORT = """
import sys, time
import torch
before = set(sys.modules)
began = time.perf_counter()
import evenstep
print(1000 * (time.perf_counter() - began), len(set(sys.modules) - before), evenstep.__file__)
"""


def count_lines(text: str) -> Counter[str]:
    """How many lines of a python file are code, docstring, comment and blank. Pure."""
    docstrings, code, comments = set[int](), set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    nothing = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments |= set(lines)
        elif token.type not in nothing:
            code |= set(lines)
    code -= docstrings
    comments -= code | docstrings
    counts = Counter(code=len(code), docstring=len(docstrings), comment=len(comments))
    counts["blank"] = len(text.splitlines()) - counts.total()
    return counts


def has_circle(imports: dict[str, set[str]]) -> bool:
    """Whether the importers can't be put in an order in which each imports only later ones. Pure."""
    left = dict(imports)
    while ground := {name for name, imported in left.items() if not imported & left.keys() - {name}}:
        left = {name: imported for name, imported in left.items() if name not in ground}
    return bool(left)


def circles(imports: dict[str, set[str]], packages: list[str]) -> list[str]:
    """The packages of which some files and sub-packages import each other in a circle. Pure.

    Args:
        imports: By module ("evenstep.data.loader"), the modules of evenstep's that it imports.
        packages: Such as "data.order".
    """
    found = []
    for package in packages:
        inside = f"evenstep.{package}."
        parts: dict[str, set[str]] = {}
        for name, imported in imports.items():
            if name.startswith(inside):
                of_package = {each.removeprefix(inside).split(".")[0] for each in imported if each.startswith(inside)}
                parts.setdefault(name.removeprefix(inside).split(".")[0], set()).update(of_package)
        if has_circle(parts):
            found.append(package)
    return found


def constant(file: Path, name: str) -> Any:
    """The value of a module's constant that is written as a literal."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                return ast.literal_eval(node.value)
    raise LookupError(f"{file} has no {name}")


def count(root: Path) -> dict[str, Any]:
    """All that is counted without running anything, of the checkout in `root`."""
    source = root / "src" / "evenstep"
    files = {"src": sorted(source.rglob("*.py")), "tests": sorted((root / "tests").rglob("*.py"))}
    lines = {where: sum((count_lines(each.read_text()) for each in of), Counter[str]()) for where, of in files.items()}
    entries = {package or "evenstep": len(inside) for package, inside in rules.entries(source).items()}
    rooms = constant(root / "tests" / "unit" / "test_house.py", "ROOMS")
    imports = rules.module_imports(source)
    private = [each for each in files["src"] if rules.private_torch(rules.tree_of(each))]
    tests = [
        node.name
        for file in files["tests"]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    pages = [*(root / "docs").rglob("*.md"), *root.glob("*.md")]
    return {
        "lines": {where: {kind: counts[kind] for kind in KINDS} for where, counts in lines.items()},
        "files": {where: len(of) for where, of in files.items()},
        "tests": len(tests),
        "entries": entries,
        "public_names": len(constant(source / "__init__.py", "__all__")),
        "upward_imports": rules.misplaced({"": rooms}, imports),
        "circles": circles(imports, sorted(entries)),
        "private_torch": sorted(each.relative_to(source).as_posix() for each in private),
        "words": sum(len(page.read_text().split()) for page in pages),
    }


def measure_imports(roots: dict[str, Path], repeats: int) -> dict[str, dict[str, Any]]:
    """By checkout, what `import evenstep` adds to `import torch`: milliseconds of each run, and number of modules."""
    found: dict[str, dict[str, Any]] = {name: {"import_ms": [], "modules": 0} for name in roots}
    for repeat in range(repeats + 1):
        for name in roots if repeat % 2 else reversed(roots):
            source = roots[name] / "src"
            environment = {**os.environ, "PYTHONPATH": str(source)}
            command = [sys.executable, "-c", MEASURE_IMPORT]
            done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, check=True)
            took, modules, where = done.stdout.strip().split(" ", 2)
            assert Path(where).is_relative_to(source), f"{where} was imported in place of {source}"
            found[name]["modules"] = int(modules)
            if repeat > 0:  # the first one compiles the files
                found[name]["import_ms"].append(float(took))
    return found


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder that is gone afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory).resolve() / "evenstep"
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def rows(counted: dict[str, Any]) -> dict[str, str]:
    """By what is counted, its figure as text. Pure."""
    table = {}
    for where, lines in counted["lines"].items():
        table[f"lines of {where}"] = f"{sum(lines.values()):,}"
        table |= {f"… of which {kind}, {where}": f"{number:,}" for kind, number in lines.items()}
    table |= {f"files of {where}": f"{number}" for where, number in counted["files"].items()}
    table["test functions"] = f"{counted['tests']:,}"
    largest = sorted(counted["entries"].items(), key=lambda each: -each[1])[:3]
    table["folders of src"] = f"{len(counted['entries'])}"
    table["files and folders in the largest folders"] = ", ".join(f"{number} ({name})" for name, number in largest)
    table["public names"] = f"{counted['public_names']}"
    table["imports that go upward between rooms"] = f"{len(counted['upward_imports'])}"
    table["packages whose parts import each other in a circle"] = f"{len(counted['circles'])}"
    elsewhere = [name for name in counted["private_torch"] if not name.startswith("compat/")]
    table["files that use private names of torch"] = f"{len(counted['private_torch'])}"
    table["… of which outside compat/"] = f"{len(elsewhere)}"
    table["words of documentation"] = f"{counted['words']:,}"
    if "import_ms" in counted:
        table["`import evenstep` after `import torch`, ms"] = f"{statistics.median(counted['import_ms']):.0f}"
        table["modules beside those of `import torch`"] = f"{counted['modules']}"
    return table


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--repeats", type=int, default=11, help="imports of each; 0: none is measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        roots = {"this checkout": ROOT}
        if args.against is not None:
            roots = {args.against: stack.enter_context(worktree(args.against))} | roots
        found = {name: count(root) for name, root in roots.items()}
        if args.repeats > 0:
            for name, of_import in measure_imports(roots, args.repeats).items():
                found[name] |= of_import
    tables = [rows(each) for each in found.values()]
    print(f"| | {' | '.join(found)} |\n| --- |{' --- |' * len(found)}")
    for what in tables[0]:
        print(f"| {what} | {' | '.join(table[what] for table in tables)} |")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
