"use strict";
(async () => {
  const read = (id) => document.getElementById(id).textContent;
  const note = (text) => {
    for (const plot of document.querySelectorAll(".plot")) {
      plot.textContent = text;
      plot.classList.add("note");
      plot.style.height = "auto";
    }
  };
  const source = read("figures");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Colours that begin with @ are those of the page, which change with the mode of the reader.
  const themedFigures = () => JSON.parse(source, (key, value) =>
    key === "color" && typeof value === "string" && value.startsWith("@") ? color(`--${value.slice(1)}`) : value);
  const names = Object.keys(JSON.parse(source)).filter((name) => !name.includes("@"));
  if (names.length === 0) return;
  if (!("DecompressionStream" in window)) {
    note("This browser is too old to draw the plot (it has no DecompressionStream). The tables show the figures.");
    return;
  }
  // The library is packed: unpacked it would make up nine tenths of the file.
  const packed = Uint8Array.from(atob(read("library")), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.nonce = read("nonce");
  script.textContent = await new Response(stream).text();
  document.head.appendChild(script);

  const narrow = window.matchMedia("(max-width: 700px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const axisNames = (layout) => Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
  const shown = {};  // the choice for a plot, where there are several

  const themed = (layout) => {
    const styled = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), size: narrow.matches ? 11 : 13 },
      margin: { l: narrow.matches ? 46 : 80, r: 12, t: layout.annotations || layout.shapes ? 26 : 8, b: 44 },
      // On a phone a finger scrolls the page; with a mouse, dragging zooms in and a double click out again.
      dragmode: narrow.matches ? false : "zoom",
      hoverlabel: { bgcolor: color("--card"), font: { color: color("--text") } },
    };
    if (narrow.matches && layout.legend) styled.legend = { ...layout.legend, entrywidth: 92 };
    for (const name of axisNames(layout)) {
      styled[name] = { ...layout[name], gridcolor: color("--line"), zerolinecolor: color("--line") };
      styled[name].automargin = true;
      if (layout[name].title) {
        styled[name].title = { standoff: 8, ...layout[name].title, font: { size: 12, color: color("--soft") } };
      }
    }
    return styled;
  };
  const draw = () => {
    const figures = themedFigures();
    return Promise.all(names.map((name) => {
      const figure = figures[shown[name] ?? name];
      const layout = themed({ ...figure.layout, height: figure.height, autosize: true });
      const options = { responsive: true, displayModeBar: false, scrollZoom: false };
      return Plotly.react(`plot-${name}`, figure.data, layout, options);
    }));
  };
  for (const button of document.querySelectorAll("button[data-plot]")) {
    button.addEventListener("click", async () => {
      shown[button.dataset.plot.split("@")[0]] = button.dataset.plot;
      for (const other of button.parentElement.children) other.ariaPressed = String(other === button);
      await draw();
    });
  }
  await draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  document.documentElement.dataset.drawn = "true";
})();
