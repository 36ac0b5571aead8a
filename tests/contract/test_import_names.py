"""`services` and `kernels` are plain root names: nothing installed may claim them, and imports must resolve in this tree."""

import importlib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["services", "kernels", "k3mesh"])
def test_root_packages_resolve_inside_this_tree(name: str):
    assert Path(str(importlib.import_module(name).__file__)).resolve().parent == ROOT / name


def test_no_installed_distribution_claims_our_names():
    claimed = packages_distributions()
    assert not {name: claimed[name] for name in ("services", "kernels") if name in claimed}
    assert set(claimed.get("k3mesh", ["k3mesh"])) == {"k3mesh"}


def test_nothing_of_ours_is_a_package_named_proto():
    assert not list((ROOT / "proto").rglob("*.py"))


def test_the_published_package_needs_no_server_code():
    needs = [need for need in distribution("k3mesh").requires or [] if "extra ==" not in need]
    assert not [need for need in needs if need.startswith(("torch", "numpy", "fastapi", "ucxx"))]
