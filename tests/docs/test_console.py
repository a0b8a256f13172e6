"""What the guides show below a command is what it prints."""

import pytest
from tests.docs import console

EXAMPLES = [(page, example) for page in console.PAGES for example in console.shown(page)]


@pytest.mark.parametrize(("page", "example"), EXAMPLES, ids=[example.command[:40] for _, example in EXAMPLES])
def test_output_is_the_one_shown(page, example):
    assert console.run(page, example) == example.output, "python -m tests.docs.console writes the output of now"


def test_every_command_of_the_page_is_found():
    assert {example.command.split()[1] for _, example in EXAMPLES} == {"plan", "check", "min-gpus", "diff", "export"}
