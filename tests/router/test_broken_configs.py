"""One file per fault. Its first lines, `# expect TEXT`, say what the messages must hold."""

import re
from pathlib import Path

import pytest

from policies.errors import YamlProblems
from router.config import load_config

FILES = sorted((Path(__file__).parent / "broken_config").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_broken_configuration_is_refused_with_place_and_hint(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected = [line[9:] for line in text.splitlines() if line.startswith("# expect ")]
    with pytest.raises(YamlProblems) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert expected
    for part in expected:
        assert any(part in line for line in lines), lines
    assert all(line.startswith(f"{path}:") for line in lines)
    assert len(lines) <= len(expected), lines
    assert not re.search("(sk-|hf_)secret", str(caught.value))
