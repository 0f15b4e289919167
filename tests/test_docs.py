"""The configurations that the documentation shows pass the check."""

import re
from pathlib import Path

import pytest

from router.config import load_config, read_policy

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(
        re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    )
    if block.startswith(("targets:", "listen:"))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_configurations_in_the_documentation_are_valid(example: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    # Models of the reader's own, which must exist.
    file.write_text(example.replace("/srv/models/", "./"), "utf-8")
    (tmp_path / "Llama-3.1-8B-Instruct").mkdir()
    read_policy(load_config(file))
