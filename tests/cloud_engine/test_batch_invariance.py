"""Answers of the cloud engine do not depend on company."""

import pytest
from random_company import assert_random_company_changes_no_answer

from engine_core.batch_model import BatchModel
from engine_core.models import ModelFiles, ModelStore


def load(files: ModelFiles) -> BatchModel:
    import torch

    from cloud_engine.open_model import open_model

    return open_model(files, ModelStore(), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.slow
async def test_random_company_changes_no_answer(builtin_files: ModelFiles) -> None:
    await assert_random_company_changes_no_answer(builtin_files, lambda: load(builtin_files))
