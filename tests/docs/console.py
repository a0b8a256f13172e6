"""Commands of the guides with the output below them. `python -m tests.docs.console` writes the output they have now.

A `text` block that begins with `$ ` is a command and what it prints to standard output, 88 columns wide; one that ends in `...` shows the
beginning. A `text` block with a file's name after the word is that file, in the folder the commands run in.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("planning",)
_BLOCK = re.compile(r"^```text ?(?P<file>\S*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A command, the lines it stands in, and the output shown below it."""

    command: str
    head: str
    output: str

    @property
    def cut(self) -> bool:
        return self.output.endswith("\n...\n")


def shown(page: str) -> Iterator[Shown]:
    for block in _BLOCK.finditer((DOCS / f"{page}.md").read_text()):
        if block["text"].startswith("$ "):
            head = re.match(r"(?:.*\\\n)*.*\n", block["text"])[0]
            command = head.removeprefix("$ ").replace("\\\n", " ").strip()
            yield Shown(command=command, head=head, output=block["text"].removeprefix(head))


def run(page: str, example: Shown) -> str:
    """What the command prints now, as the page would show it."""
    program, *words = shlex.split(example.command)
    assert program == "shardwise", example.command
    with tempfile.TemporaryDirectory() as folder:
        for block in _BLOCK.finditer((DOCS / f"{page}.md").read_text()):
            if block["file"]:
                Path(folder, block["file"]).write_text(block["text"])
        environment = os.environ | {"COLUMNS": "88", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
        )
    assert done.returncode in (0, 1), done.stderr
    lines = "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n").split("\n")
    if example.cut:
        lines = [*lines[: example.output.count("\n") - 1], "..."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        path = DOCS / f"{name}.md"
        for example in list(shown(name)):
            path.write_text(path.read_text().replace(example.head + example.output, example.head + run(name, example)))
