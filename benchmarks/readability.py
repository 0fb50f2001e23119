"""Words, length of sentences and reading ease of the README and of the user's pages, before and after.

    pip install "textstat==0.7.4" "setuptools<81"
    python benchmarks/readability.py 9b689ac HEAD     # two commits, as a table in Markdown

Counted is prose: no code, no tables, no lists of links. Reading ease is Flesch's (100: very easy, 30: difficult), of
`textstat`. Contributing pages aren't counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from statistics import mean

import textstat


def main() -> None:
    """Print the tables."""
    before, after = sys.argv[1:3]
    old, new = measure(before), measure(after)
    print(f"| | before ({before}) | after |\n| --- | ---: | ---: |")
    rows = {
        "pages of the user": lambda found: len(found),
        "words in all": lambda found: sum(page["all words"] for page in found.values()),
        "words of a page, mean": lambda found: round(mean(page["all words"] for page in found.values())),
        "words of a page, median": lambda found: sorted(page["all words"] for page in found.values())[len(found) // 2],
        "pages over 1,500 words": lambda found: sum(page["all words"] > 1500 for page in found.values()),
    }
    for name, figure in rows.items():
        print(f"| {name} | {figure(old):,} | {figure(new):,} |")
    for title, pick in (("README", lambda name: name == "README.md"), ("site", lambda name: name != "README.md")):
        was, now = (together(found, pick) for found in (old, new))
        for what in ("words a sentence", "Flesch reading ease", "Flesch-Kincaid grade"):
            print(f"| {title}: {what} | {was[what]:.1f} | {now[what]:.1f} |")
    print("\n| page | words | prose | words a sentence | reading ease |\n| --- | ---: | ---: | ---: | ---: |")
    for name, page in sorted(new.items()):
        prose = page["text"]
        if len(prose.split()) < 30:
            continue
        found = figures(prose)
        print(
            f"| {name.removeprefix('docs/')} | {page['all words']:,} | {len(prose.split()):,} | "
            f"{found['words a sentence']:.1f} | {found['Flesch reading ease']:.0f} |"
        )


def measure(commit: str) -> dict[str, dict]:
    """Pages of a commit by path, with their prose."""
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=True)
    names = [
        name
        for name in listed.stdout.splitlines()
        if name == "README.md" or (name.startswith("docs/") and name.endswith(".md") and "/contributing/" not in name)
    ]
    found = {}
    for name in names:
        text = subprocess.run(["git", "show", f"{commit}:{name}"], capture_output=True, text=True, check=True).stdout
        found[name] = {"all words": len(text.split()), "text": prose_of(text)}
    return found


def prose_of(text: str) -> str:
    """What one reads as sentences."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", ":::", "    ", "```"))]
    text = "\n".join(re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n", line) for line in lines)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "name", text)
    paragraphs = [" ".join(each.split()).strip("*: ") for each in re.split(r"\n\s*\n", text)]
    return "\n".join(each if each.endswith((".", "?", "!")) else f"{each}." for each in paragraphs if each)


def together(found: dict[str, dict], pick) -> dict[str, float]:
    """The figures of several pages as one text."""
    return figures("\n".join(page["text"] for name, page in found.items() if pick(name)))


def figures(prose: str) -> dict[str, float]:
    """Of one text."""
    sentences = [each for each in re.split(r"(?<=[.!?])\s+", prose) if each.split()]
    return {
        "words a sentence": sum(len(each.split()) for each in sentences) / len(sentences),
        "Flesch reading ease": textstat.flesch_reading_ease(prose),
        "Flesch-Kincaid grade": textstat.flesch_kincaid_grade(prose),
    }


if __name__ == "__main__":
    main()
