"""The Python blocks of the README and of the guides run, page by page, on two ranks."""

import re
import warnings
from pathlib import Path

import pytest

from shardwise.testing import ranks

README = Path(__file__).parents[2] / "README.md"
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("domain_training", "checklist", "handlers", "pitfalls")


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
@ranks(2, processes=True, timeout=120)
def test_python_blocks_run(world, page):
    blocks = python_blocks(DOCS / f"{page}.md")
    assert blocks
    names = {"__name__": page}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)


@ranks(2, processes=True, timeout=120)
def test_the_script_of_the_readme_runs(world):
    script, _ = python_blocks(README)
    names = {"__name__": "train"}
    exec(compile(script, "README.md", "exec"), names)
    assert names["loss"].isfinite()


def test_the_proof_of_the_readme_runs():
    _, proof = python_blocks(README)
    names = {"__name__": "proof"}
    exec(compile(proof, "README.md", "exec"), names)
    names["test_my_model"]()
