"""Answers of the edge engine do not depend on company."""

import pytest
from random_company import assert_random_company_changes_no_answer

from edge_engine.build import ensure_build
from edge_engine.open_model import open_model
from engine_core.models import ModelFiles, ModelStore


@pytest.mark.slow
async def test_random_company_changes_no_answer(builtin_files: ModelFiles) -> None:
    build = ensure_build(ModelStore(), builtin_files, progress=False)
    await assert_random_company_changes_no_answer(builtin_files, lambda: open_model(build))
