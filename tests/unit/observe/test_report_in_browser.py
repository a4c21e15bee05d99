"""A report in a real browser: it draws, asks nothing of a network, fits a phone, follows the dark mode."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planned import planned

from choices import in_sweep
from observe.run_folders import run_folder
from shardwright.observe.report import write_report

EVIL = "<script>document.title='pwned'</script><img src=x onerror=document.title='pwned'>{stage}"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


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
    folder = run_folder(
        tmp_path_factory.mktemp("report") / "run", planned(kind="zb_h1", ranks=3, unit=EVIL), recorded=True
    )
    return write_report(folder, folder / "report.html")


def show(browser: Any, report: Path, *, dark: bool = False, phone: bool = False) -> None:
    """Loads the page and waits until its plots are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    for log in ("browser", "performance"):
        browser.get_log(log)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    if phone:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    else:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
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
    assert shown["memory_predicted"] == max(part.peak for part in plan.prediction.memory)
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


@pytest.mark.parametrize("ranks", [in_sweep(3), 512])
def test_a_phone_scrolls_down_only(browser: Any, tmp_path: Path, ranks: int) -> None:
    folder = run_folder(tmp_path / "run", planned(ranks=ranks, microbatches=2, unit=EVIL), trace=ranks < 10)
    show(browser, write_report(folder, folder / "report.html"), phone=True)
    width, inside = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert inside == PHONE["width"]
    assert width <= inside
    plots = browser.execute_script(
        "return [...document.querySelectorAll('.plot .main-svg')].map(p => p.getBoundingClientRect().right)"
    )
    assert max(plots) <= inside


def test_dark_mode_changes_page_and_plots(browser: Any, report: Path) -> None:
    script = (
        "return [getComputedStyle(document.body).backgroundColor,"
        " document.querySelector('#plot-loss .xtick text').style.fill]"
    )
    show(browser, report)
    light = browser.execute_script(script)
    show(browser, report, dark=True)
    dark = browser.execute_script(script)
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(13, 17, 23)"
    assert light[1] != dark[1]
