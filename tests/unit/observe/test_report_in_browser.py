"""A report in a real browser: it draws, asks nothing of a network, fits a phone, follows the dark mode."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planned import planned

from choices import thorough
from observe.run_folders import run_folder
from shardwright.observe.report import write_report

EVIL = "<script>document.title='pwned'</script><img src=x onerror=document.title='pwned'>{stage}"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
DESK = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}


@pytest.fixture(scope="module")
def browser(capabilities: dict[str, bool]) -> Iterator[Any]:
    if not capabilities["headless browser"]:
        pytest.skip("needs chromium, chromium-driver, selenium and plotly: apt-get install chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_folder(tmp_path_factory.mktemp("report") / "run", planned(kind="zb_h1", ranks=3, unit=EVIL))
    return write_report(folder, folder / "report.html")


def show(browser: Any, report: Path, *, dark: bool = False, phone: bool = False) -> None:
    """Loads the page and waits until its plots are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    for log in ("browser", "performance"):
        browser.get_log(log)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE if phone else DESK)
    browser.get(report.as_uri())
    WebDriverWait(browser, 60).until(
        lambda driver: driver.execute_script("return document.documentElement.dataset.drawn === 'true'")
    )


def requests(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def test_it_draws_without_errors_and_without_a_network(browser: Any, report: Path) -> None:
    show(browser, report)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.plot')]"
        ".map(p => [p.id, p.querySelectorAll('.main-svg').length])"
    )
    names = {"timeline", "memory", "stack", "waterfall", "loss", "steps"}
    assert {name for name, _ in drawn} == {f"plot-{name}" for name in names}
    assert all(count > 0 for _, count in drawn)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    # The page itself, and data: URLs, which are part of it.
    outside = [url for url in requests(browser) if not url.startswith(("data:", "blob:", report.as_uri()))]
    assert outside == []


def test_names_are_shown_and_not_executed(browser: Any, report: Path) -> None:
    show(browser, report)
    assert browser.title == "run - Shardwright"
    assert EVIL.format(stage=0) in browser.find_element("tag name", "body").text


def test_its_figures_are_those_of_the_plan(browser: Any, report: Path) -> None:
    plan = planned(kind="zb_h1", ranks=3, unit=EVIL)
    assert plan.prediction is not None
    show(browser, report)
    shown = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map(e => [e.dataset.figure, Number(e.dataset.value)]))"
    )
    assert shown["step_predicted"] == plan.prediction.step_s
    assert shown["step_measured"] == 1.1 * plan.prediction.step_s
    assert shown["memory_predicted"] == max(part.peak_bytes for part in plan.prediction.memory)
    parts = browser.execute_script(
        "return [...document.querySelectorAll('[data-part]')].map(e => Number(e.dataset.value))"
    )
    assert sum(parts) == pytest.approx(plan.prediction.step_s, rel=1e-9)
    # The bars on the plot are the same parts, in ms or in s, and the lanes are the ranks.
    bars = browser.execute_script("return document.getElementById('plot-waterfall').data[0].x")
    assert list(bars) == pytest.approx(parts)
    lanes = browser.execute_script(
        "return [...document.querySelectorAll('#plot-timeline .ytick text, #plot-timeline .y2tick text')]"
        ".map(e => e.textContent)"
    )
    assert sorted(lanes) == sorted(["rank 0", "rank 1", "rank 2"] * 2)


def horizontal_scroll(browser: Any) -> int:
    """Pixels by which the page is wider than its window."""
    width, inside = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    return max(0, width - inside)


def visible(browser: Any, selector: str) -> bool:
    """Whether an element lies in the first screen, with its whole width."""
    left, top, right, inside, high = browser.execute_script(
        "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [box.left, box.top, box.right, document.documentElement.clientWidth, innerHeight]",
        selector,
    )
    return bool(0 <= left < right <= inside and 0 <= top < high)


@pytest.mark.parametrize(
    ("phone", "dark"),
    [(True, False), (False, True), thorough(True, True), thorough(False, False)],
    ids=["390-light", "1280-dark", "390-dark", "1280-light"],
)
def test_pages_fit_and_answer_first(browser: Any, report: Path, phone: bool, dark: bool) -> None:
    """The report's tables made a phone scroll sideways, and nothing on it said why a run was slow."""
    show(browser, report, dark=dark, phone=phone)
    assert browser.execute_script("return innerWidth") == (390 if phone else 1280)
    assert horizontal_scroll(browser) == 0
    assert visible(browser, "#verdict")
    assert browser.execute_script("return document.querySelectorAll('.modebar').length") == 0
    right = browser.execute_script(
        "return Math.max(...[...document.querySelectorAll('table, .plot .main-svg, .stage')]"
        ".map(e => e.getBoundingClientRect().right))"
    )
    assert right <= (390 if phone else 1280)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
