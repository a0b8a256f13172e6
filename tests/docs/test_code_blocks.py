"""The Python blocks of the guides run, page by page, on two ranks."""

import re
import warnings
from pathlib import Path

import pytest

from shardwise.testing import ranks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("domain_training", "checklist", "handlers", "pitfalls")


@pytest.mark.parametrize("page", PAGES)
@ranks(2, processes=True, timeout=120)
def test_python_blocks_run(world, page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names = {"__name__": page}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)
