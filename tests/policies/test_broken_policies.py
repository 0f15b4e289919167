"""One file per fault. Its first lines, `# expect TEXT`, say what the messages must hold."""

from pathlib import Path

import pytest

from policies.errors import YamlProblems
from policies.policy import load_policy

FILES = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
TARGETS = {"edge": "edge", "cloud": "cloud"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_broken_policy_is_refused_with_place_and_hint(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected = [line[9:] for line in text.splitlines() if line.startswith("# expect ")]
    # The marks of the expected lines count the comment lines too: the file is read as it is.
    with pytest.raises(YamlProblems) as caught:
        load_policy(text, path.name, TARGETS)
    lines = str(caught.value).splitlines()
    assert expected
    for part in expected:
        assert any(part in line for line in lines), lines
    assert all(line.startswith(f"{path.name}:") for line in lines)
    assert len(lines) <= len(expected), lines
