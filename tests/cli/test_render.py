"""Tables for the terminal."""

import pytest

from shardwise.cli.render import print_table


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_cell_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = ("0", "1,038,682,112", "1,038,682,113", "some words that may break", "18.1")
    print_table("Title", ("rank", "parameters", "described", "text", "backward"), [cells], wrap=(3,))
    words = capsys.readouterr().out.split()
    assert {"rank", "parameters", "described", "backward", "0", *cells[1:3], "18.1", *cells[3].split()} <= set(words)
