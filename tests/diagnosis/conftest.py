"""Diagnoses of files that a test saves."""

import pytest
import torch

from ckptool.diagnosis import doctor


@pytest.fixture
def diagnosed(tmp_path):
    """The diagnosis of a saved object, against a saved reference where there is one."""

    def of(root, like=None, **options):
        torch.save(root, tmp_path / "model.pth")
        if like is not None:
            torch.save(like, tmp_path / "reference.pth")
            options["like"] = tmp_path / "reference.pth"
        options.setdefault("quick", True)
        options.setdefault("devices", ["cpu"])
        return doctor(tmp_path / "model.pth", **options)

    return of


@pytest.fixture
def complaint(diagnosed):
    """The one complaint of a kind about a saved object; None where there is none."""

    def of(kind, root, like=None, **options):
        found = [one for one in diagnosed(root, like, **options).complaints if one.kind == kind]
        assert len(found) <= 1
        return found[0] if found else None

    return of
