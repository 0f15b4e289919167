"""Answers of the edge engine do not depend on company."""

import pytest
from random_company import assert_random_company_changes_no_answer

from edge_engine.build import ensure_build
from edge_engine.open_model import open_model
from engine_core.batch_engine import BatchEngine
from engine_core.models import ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer


@pytest.mark.slow
async def test_random_company_changes_no_answer(builtin_files: ModelFiles) -> None:
    build = ensure_build(ModelStore(), builtin_files, progress=False)
    engine = BatchEngine(
        model="m",
        load=lambda: open_model(build),
        tokenizer=Tokenizer.load(builtin_files),
        max_waiting=1000,
    )
    await engine.start()
    try:
        await assert_random_company_changes_no_answer(engine)
    finally:
        await engine.close()
