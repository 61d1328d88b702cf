"""What the tests of formats may ask for."""

import shutil

import pytest
import torch


@pytest.fixture
def file(tmp_path, fixtures):
    """Makes a file to be edited: a copy of a fixture, bytes, or what torch saves."""

    def made(content):
        path = tmp_path / "model.pth"
        if isinstance(content, str):
            shutil.copyfile(fixtures / content, path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        return path

    return made
