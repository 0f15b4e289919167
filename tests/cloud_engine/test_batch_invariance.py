"""Answers of the cloud engine do not depend on company."""

import pytest
from random_company import assert_random_company_changes_no_answer

from engine_core.batch_engine import BatchEngine
from engine_core.batch_model import BatchModel
from engine_core.models import ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer


def load(files: ModelFiles) -> BatchModel:
    import torch

    from cloud_engine.open_model import open_model

    return open_model(files, ModelStore(), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.slow
async def test_random_company_changes_no_answer(builtin_files: ModelFiles) -> None:
    engine = BatchEngine(
        model="m",
        load=lambda: load(builtin_files),
        tokenizer=Tokenizer.load(builtin_files),
        max_waiting=1000,
    )
    await engine.start()
    try:
        await assert_random_company_changes_no_answer(engine)
    finally:
        await engine.close()
