"""After which failure of a save the training goes on."""

import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.files import write_tensors, write_whole
from tests.harness import full_disk


def waited(error: BaseException) -> str | None:
    checkpointer = Checkpointer(Mock(), Mock(), Mock(), Mock(start_step=0))
    checkpointer._writing = Future()
    checkpointer._writing.set_exception(error)
    found = checkpointer.close()
    assert checkpointer.last_save_failed
    return found


def test_the_training_goes_on_after_a_failure_of_the_disk(tmp_path: Path) -> None:
    assert waited(OSError(28, "No space left\non device")) == "[Errno 28] No space left on device"
    path = tmp_path / "file"
    with pytest.raises(OSError, match="too large") as error, full_disk():
        write_whole(path, partial(write_tensors, tensors={"a": torch.zeros(1000)}))
    assert waited(error.value) == f"[Errno 27] File too large: '{path}'"
    assert not list(tmp_path.iterdir())


def test_files_of_tensors_have_the_mode_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", partial(write_tensors, tensors={"a": torch.zeros(9)}))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.zeros(9))


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), SafetensorError("invalid shape"), MemoryError()]
)
def test_any_other_failure_of_a_save_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        waited(error)
