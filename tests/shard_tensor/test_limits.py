"""The limits of `docs/limits.md` do not hold here."""

from pathlib import Path

import pytest
from tests.limits import LIMITS, page

from shardwise.testing import ranks

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@ranks(4)
def test_works_here(world, limit):
    limit.check(world)


def test_page_lists_what_is_tested():
    assert PAGE.read_text() == page(), "run python -m tests.limits > docs/limits.md"
