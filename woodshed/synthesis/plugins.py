"""Plugins of pytest that a repository's configuration demands, and the distributions that bring them.

Only names that are written here, or that the configuration itself writes as distributions (`required_plugins`), become
requirements: the name of a module or an option is never taken for the name of a distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from woodshed.synthesis.configuration import conftest_plugins, pytest_settings, words


@dataclass(frozen=True)
class Demand:
    """Something in the configuration that no run of pytest can do without."""

    cause: str
    """The setting, as it stands there."""
    requirement: str = ""
    """The distribution; "" where nobody here knows which one it is."""


@dataclass(frozen=True)
class Plugin:
    """The names of one plugin, each kind as words."""

    modules: str = ""
    """As `-p` and `pytest_plugins` may name it: entry points and packages."""
    options: str = ""
    """Its options, or what others of it have before a further hyphen."""
    settings: str = ""
    """Its keys in pytest's settings, in lower case; one that ends in an underscore begins others."""


PLUGINS = {
    "anyio": Plugin("anyio", settings="anyio_mode"),
    "hypothesis": Plugin("hypothesispytest hypothesis", "--hypothesis"),
    "pytest-aiohttp": Plugin("pytest_aiohttp aiohttp-server"),
    "pytest-asyncio": Plugin("asyncio pytest_asyncio", "--asyncio", "asyncio_"),
    "pytest-bdd": Plugin("pytest-bdd pytest_bdd", "--gherkin --cucumberjson", "bdd_features_base_dir"),
    "pytest-benchmark": Plugin("benchmark pytest_benchmark", "--benchmark"),
    "pytest-cov": Plugin("pytest_cov cov", "--cov --no-cov"),
    "pytest-datadir": Plugin("pytest-datadir pytest_datadir"),
    "pytest-django": Plugin(
        "django pytest_django",
        "--ds --dc --reuse-db --create-db --nomigrations --no-migrations --migrations",
        "django_settings_module django_configuration django_find_project",
    ),
    "pytest-doctestplus": Plugin(
        "pytest_doctestplus",
        "--doctest-plus --doctest-rst --text-file-format",
        "doctest_plus text_file_format",
    ),
    "pytest-env": Plugin("env pytest_env", settings="env"),
    "pytest-flask": Plugin("flask pytest_flask", "--live-server"),
    "pytest-forked": Plugin("pytest_forked", "--forked"),
    "pytest-html": Plugin("html pytest_html", "--html --self-contained-html"),
    "pytest-httpserver": Plugin("pytest_httpserver"),
    "pytest-httpx": Plugin("pytest_httpx"),
    "pytest-json-report": Plugin("pytest_jsonreport", "--json-report"),
    "pytest-mock": Plugin("pytest_mock", "--mock", "mock_use_standalone_module mock_traceback_monkeypatch"),
    "pytest-order": Plugin("order pytest_order", "--order"),
    "pytest-qt": Plugin("pytest-qt pytestqt", "--no-qt-log --qt-log", "qt_"),
    "pytest-random-order": Plugin("random_order random-order", "--random-order"),
    "pytest-randomly": Plugin("randomly pytest_randomly", "--randomly"),
    "pytest-recording": Plugin("recording pytest_recording", "--record-mode --block-network"),
    "pytest-remotedata": Plugin("pytest_remotedata", "--remote-data", "remote_data_strict"),
    "pytest-rerunfailures": Plugin(
        "rerunfailures pytest_rerunfailures", "--reruns --only-rerun", "reruns reruns_delay rerun_except"
    ),
    "pytest-snapshot": Plugin("snapshot pytest_snapshot", "--snapshot-update"),
    "pytest-socket": Plugin("socket pytest_socket", "--disable-socket --allow-hosts --allow-unix-socket"),
    "pytest-subtests": Plugin("subtests pytest_subtests"),
    "pytest-sugar": Plugin("sugar pytest_sugar"),
    "pytest-timeout": Plugin("timeout pytest_timeout", "--timeout", "timeout timeout_"),
    "pytest-trio": Plugin("trio pytest_trio", settings="trio_mode trio_run"),
    "pytest-twisted": Plugin("twisted pytest_twisted", "--reactor"),
    "pytest-xdist": Plugin(
        "xdist", "-n --numprocesses --dist --tx --maxprocesses --looponfail", "looponfailroots"
    ),
    "syrupy": Plugin("syrupy", "--snapshot-details --snapshot-warn"),
}
"""Distributions, each as the package index has it."""

IMPORTED_AS = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "django": "django",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "flask": "flask",
    "freezegun": "freezegun",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "jwt": "pyjwt",
    "lxml": "lxml",
    "numpy": "numpy",
    "pandas": "pandas",
    "parameterized": "parameterized",
    "PIL": "pillow",
    "pkg_resources": "setuptools<82",
    "pydantic": "pydantic",
    "pytz": "pytz",
    "requests": "requests",
    "scipy": "scipy",
    "six": "six",
    "sklearn": "scikit-learn",
    "sqlalchemy": "sqlalchemy",
    "toml": "toml",
    "yaml": "pyyaml",
}
"""Modules, each with the distribution that is known to bring it. No other module's name is advised as one."""


def demands(tree: Path) -> list[Demand]:
    """All that the settings of pytest and the conftest files demand, once each."""
    settings = {key.lower(): value for key, value in pytest_settings(tree).items()}
    all_demands = [*_required(words(settings.get("required_plugins")))]
    all_demands += _options(words(settings.get("addopts")))
    for key in settings:
        named = [name for name, plugin in PLUGINS.items() if _is_setting(key, plugin.settings.split())]
        all_demands += [Demand(key, name) for name in named]
    for module in conftest_plugins(tree):
        top = module.partition(".")[0]
        name = "" if (tree / top).is_dir() or (tree / f"{top}.py").is_file() else distribution(module)
        all_demands += [Demand(f'pytest_plugins = ["{module}"]', name)] if name else []
    return list({(demand.requirement or demand.cause): demand for demand in all_demands}.values())


def _required(listed: list[str]) -> Iterator[Demand]:
    for text in listed:
        try:
            yield Demand(f"required_plugins = {text}", str(Requirement(text)))
        except InvalidRequirement:
            yield Demand(f"required_plugins = {text}")


def _options(listed: list[str]) -> Iterator[Demand]:
    for option, following in zip(listed, [*listed, ""][1:], strict=True):
        if option.startswith("-p") and not option.startswith("--"):
            module = option[2:].strip() or following
            if name := distribution(module):
                yield Demand(f"addopts = -p {module}", name)
        elif option.startswith("-n"):
            yield Demand(f"addopts = {option}", "pytest-xdist")
        elif option.startswith("--"):
            for name, plugin in PLUGINS.items():
                if _is_option(option.partition("=")[0], plugin.options.split()):
                    yield Demand(f"addopts = {option}", name)


def _is_option(text: str, known: list[str]) -> bool:
    return any(text == option or text.startswith(f"{option}-") for option in known)


def _is_setting(text: str, known: list[str]) -> bool:
    return any(text == key or (key.endswith("_") and text.startswith(key)) for key in known)


def distribution(module: str) -> str:
    """The distribution of a plugin's module, or of a module inside it; "" for all others, built-in ones too."""
    top = module.partition(".")[0]
    return next((name for name, plugin in PLUGINS.items() if {module, top} & {*plugin.modules.split()}), "")
