"""A repository as businesses have them: a private dependency, an environment variable, a slow test that its own options
leave out, a test that fails, and classes that conftest imports."""

from __future__ import annotations

import zipfile
from pathlib import Path

FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "shop"
version = "1.0"
dependencies = ["acme-money==1.0"]

[tool.setuptools]
packages = ["shop"]

[tool.pytest.ini_options]
addopts = "-m 'not slow' -ra"
markers = ["slow: takes minutes"]
testpaths = ["tests"]
""",
    "shop/__init__.py": "",
    "shop/region.py": "import os\n\nREGION = os.environ['SHOP_REGION']\n",
    "shop/cart.py": '''\
"""Carts."""

from acme_money import cents


class Cart:
    """Things that somebody wants to buy."""

    def __init__(self):
        self.lines = []

    def add(self, name, price, count=1):
        """Put something into the cart.

        Raises:
            ValueError: the count is below one.
        """
        if count < 1:
            raise ValueError(f"count {count} is below 1")
        self.lines.append((name, price, count))

    def total(self):
        """Price of everything, in cents."""
        return sum(cents(price) * count for _, price, count in self.lines)
''',
    "shop/tax.py": '''\
"""Taxes."""

from shop.region import REGION

RATES = {"north": 19, "south": 7}


def tax(cents):
    """Tax on a price of so many cents, rounded down."""
    return cents * RATES[REGION] // 100


def gross(cents):
    """The price with its tax."""
    return cents + tax(cents)
''',
    "tests/__init__.py": "",
    "tests/conftest.py": """\
import pytest

from shop.cart import Cart
from shop.tax import RATES


@pytest.fixture
def cart():
    cart = Cart()
    cart.add("pen", "1.50", 2)
    return cart


@pytest.fixture
def rates():
    return dict(RATES)
""",
    "tests/test_cart.py": """\
import pytest


def test_total(cart):
    assert cart.total() == 300


def test_add(cart):
    cart.add("ink", "4.00")
    assert cart.total() == 700 and len(cart.lines) == 2


def test_count(cart):
    with pytest.raises(ValueError, match="count 0 is below 1"):
        cart.add("ink", "4.00", 0)
""",
    "tests/test_tax.py": """\
import time

import pytest

from shop.tax import gross, tax


def test_rates(rates):
    assert rates["south"] == 7


def test_tax():
    assert [tax(100), tax(250), tax(0)] == [19, 47, 0]


@pytest.mark.parametrize("price", range(100, 600, 100))
def test_tax_of_hundreds(price):
    assert tax(price) == 19 * price // 100


def test_gross():
    assert [gross(100), gross(0)] == [119, 0]


def test_of_another_year():
    assert tax(100) == 16, "the rate of 2020"


@pytest.mark.slow
def test_many():
    time.sleep(3600)
""",
}


def lay(root: Path) -> Path:
    """Write the repository into a folder."""
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def private_wheel(folder: Path) -> Path:
    """Write the wheel of the private dependency into a folder, for PIP_FIND_LINKS."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "acme_money-1.0.dist-info"
    with zipfile.ZipFile(folder / "acme_money-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("acme_money.py", "def cents(price):\n    return round(float(price) * 100)\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-money\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder
